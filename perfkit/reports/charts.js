// Every chart is drawn again so that the pointer can ask it; its picture stays where that fails.
for (const figure of document.querySelectorAll("figure")) {
  const still = figure.querySelector("div"), live = document.createElement("div");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const options = { renderer: "svg", actions: false, ast: true }; // no code is made of text
  vegaEmbed(live, spec, options).then(() => still.replaceWith(live)).catch(console.error);
}
