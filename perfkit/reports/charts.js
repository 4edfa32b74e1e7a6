// Every chart is drawn again, so that the pointer shows values. If that fails, the picture stays.
for (const figure of document.querySelectorAll("figure")) {
  const live = document.createElement("div"), spec = JSON.parse(figure.querySelector("script").textContent);
  vegaEmbed(live, spec, { renderer: "svg", actions: false, ast: true }) // ast: no text is turned into code
    .then(() => figure.querySelector("div").replaceWith(live), console.error);
}
