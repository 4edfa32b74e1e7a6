"""The documentation site: `make docs` builds it from docs/, the lessons with their stored outputs,
and docstrings."""

import pkgutil
import re
from html import unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import index, pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.logging import getLogger

import perfkit
from perfkit import plots

logger = getLogger(__name__)
project, author, release = "perfkit", "The perfkit authors", perfkit.__version__
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "notebooks/*.ipynb",
]
extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_nb"]
nb_execution_mode = "off"
nb_merge_streams = True
# of charts with sliders, a picture is stored beside
suppress_warnings = ["mystnb.unknown_mime_type"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
numpydoc_show_class_members = False
autodoc_default_options = {"members": True, "inherited-members": "BaseException"}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "py:obj"
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 100
html_theme = "furo"
html_title = f"perfkit {release}"
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # it would fetch pages, which browsers refuse for files
html_static_path, html_css_files = ["static"], ["site.css"]
html_math_renderer = "mathml"

#: Charts whose sliders move without a kernel, see charts.md.
CHARTS = {
    "alpha_beta": plots.ask_alpha_beta(alpha=10e-6, beta=1 / 200e9),
    "roofline": plots.ask_roofline(peak=700e12, bandwidth=2.6e12),
    "unique_rows": plots.ask_unique_rows(rows=10**6, lookups=4096 * 20),
}

#: Pages that name what no longer exists.
HISTORY = ("CHANGELOG", "docs/upgrading")
#: Kinds of fragments of the changelog, in their order.
KINDS_OF_CHANGES = ("added", "changed", "removed", "fixed")


class IndexTerms(SphinxTransform):
    """Terms of the glossary are entries of the index, which a search looks at first: each word of
    the first column leads to its row."""

    default_priority = 400  # after the table was read, before the index is collected

    def apply(self, **kwargs: Any) -> None:
        if self.env.docname != "docs/glossary":
            return
        for body in self.document.findall(nodes.tbody):
            for row in body.findall(nodes.row):
                cell = row[0]
                words = cell.astext().split(", ")
                target = f"term-{nodes.make_id(words[0])}"
                cell["ids"].append(target)
                cell.insert(
                    0, index(entries=[("single", word, target, "main", None) for word in words])
                )


class NamePictures(SphinxPostTransform):
    """Charts of lessons have their title as alternative text."""

    default_priority = 4

    def run(self, **kwargs: Any) -> None:
        for picture in self.document.findall(nodes.image):
            path = Path(self.env.srcdir, picture["uri"])
            found = (
                re.search(r"Title text '(.+?)'\"", path.read_text("utf-8"))
                if path.suffix == ".svg"
                else None
            )
            if found and "alt" not in picture:
                picture["alt"] = unescape(found[1])


class LinkNames(SphinxPostTransform):
    """Code such as `pk.predict` in a page or a lesson becomes a link to its description, where
    there is one."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs: Any) -> None:
        if self.env.docname in HISTORY:
            return
        known = self.env.get_domain("py").objects  # type: ignore[attr-defined]
        for code in list(self.document.findall(nodes.literal)):
            match = re.fullmatch(r"(?:pk|perfkit)\.([\w.]+)(\(.*\))?", code.astext())
            if not match or isinstance(code.parent, nodes.reference | pending_xref):
                continue
            name = f"perfkit.{match[1]}"
            try:
                found = pkgutil.resolve_name(name)
            except (AttributeError, ImportError):
                logger.warning("there is no %s", name, location=code)
                continue
            if name not in known:  # a module may offer what another one defines
                name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
            if name in known:
                link = pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=name, refdoc=self.env.docname
                )
                code.replace_self(link)
                link += code


def write_math(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Formulas become MathML, which browsers draw without a script."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def join_changes(app: Sphinx, page: str, source: list[str]) -> None:
    """The changelog begins with what is not released yet, from the fragments of changelog.d."""
    if page != "CHANGELOG":
        return
    lines = ["## Not released yet\n"]
    for kind in KINDS_OF_CHANGES:
        fragments = sorted(Path(app.srcdir, "changelog.d").glob(f"*.{kind}.md"))
        if fragments:
            lines.append(f"### {kind.capitalize()}\n")
        for path in fragments:
            text = path.read_text(encoding="utf-8").strip()
            lines.append("- " + text.replace("\n", "\n  "))
        lines.append("")
    mark = "<!-- fragments of changelog.d come in below -->"
    if mark not in source[0]:
        raise ValueError(f"CHANGELOG.md has no line {mark}; fragments are joined there")
    source[0] = source[0].replace(mark, "\n".join(lines))


def draw_charts(app: Sphinx) -> None:
    """The charts with sliders as pictures, where these stand at first: for print, and where no
    script runs."""
    for name, chart in CHARTS.items():
        chart.save(Path(app.srcdir, "docs", f"chart_{name}.svg"))


def write_charts(app: Sphinx, error: Exception | None) -> None:
    """The charts with sliders, and the page that leads from the top of the site to its index."""
    out = Path(app.outdir)
    (out / "docs" / "charts").mkdir(exist_ok=True)
    for name, chart in CHARTS.items():
        chart.save(
            out / "docs" / "charts" / f"{name}.html", inline=True, embed_options={"actions": False}
        )
    (out / "index.html").write_text(
        '<meta http-equiv="refresh" content="0; url=docs/index.html">', encoding="utf-8"
    )


def setup(app: Sphinx) -> None:
    plots.use_svg()
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.add_transform(IndexTerms)
    app.add_post_transform(NamePictures)
    app.add_post_transform(LinkNames)
    app.connect("builder-inited", draw_charts)
    app.connect("source-read", join_changes)
    app.connect("build-finished", write_charts)
