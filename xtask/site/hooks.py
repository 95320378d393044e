"""Pages of the documentation site that are made from other files, and the links between them."""

import html
import json
import logging
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import monitoring

LOG = logging.getLogger("mkdocs.hooks.windlass")
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Documents in the root of the repository that are pages of the site.
ROOT_PAGES = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^()\s]+\.svg)\)")
HEADING = re.compile(r'<h([23]) id="([^"]+)">(.*?)</h\1>', re.DOTALL)
INLINE = {"a", "b", "code", "em", "i", "span", "strong"}
# What a browser fetches by itself, in pages and style sheets.
LOADED = re.compile(r"""(?:<(?:img|script|iframe|link|source|object)[^>]*?(?:src|href|data)=|url\(|@import )["']?(https?:[^"')\s]+|//[^"')\s]+)""")
INDEX = []
FENCE = re.compile(r"^( *(?:```|~~~).*?^ *(?:```|~~~) *$)", re.MULTILINE | re.DOTALL)


def on_config(config):
    """Fills the parts of the navigation that list every file of a directory."""
    INDEX.clear()
    decisions = sorted(path.name for path in (DOCS / "decisions").glob("*.md"))
    fill(config.nav, "decisions", [f"decisions/{name}" for name in decisions])
    codes = sorted(path.name for path in (DOCS / "errors").glob("[A-Z]0*.md"))
    fill(config.nav, "errors/README.md", [{"All codes": "errors/README.md"}, *[f"errors/{name}" for name in codes]])
    return config


def fill(entries, name, pages):
    for entry in entries:
        for title, value in entry.items() if isinstance(entry, dict) else []:
            if value == name:
                entry[title] = pages
            elif isinstance(value, list):
                fill(value, name, pages)


def on_files(files, config):
    for problem in monitoring.problems(DOCS):
        # With `strict`, a warning fails the build.
        LOG.warning(problem)
    generated = {name: (ROOT / name).read_text() for name in ROOT_PAGES}
    generated["reference/api.md"] = api_page(json.loads((DOCS / "api/openapi.json").read_text()))
    generated["reference/states.md"] = states_page()
    for name, text in generated.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Follows links as in the repository; a link to a source file becomes text, because the site has no sources."""
    name = page.file.src_uri
    here = posixpath.dirname(name if name in ROOT_PAGES else f"docs/{name}")
    site = posixpath.dirname(name)

    def link(match):
        text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match.group()
        path, mark, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(here, path))
        if found == "README.md":
            found = "docs/index.md"
        if found in ROOT_PAGES or found.startswith("docs/"):
            found = found.removeprefix("docs/")
            if found == "transitions" or found.startswith("transitions/"):
                anchor = posixpath.basename(found).removesuffix(".txt") if "/" in found else ""
                found, mark = "reference/states.md", "#" if anchor else ""
            if found == "api/openapi.json" and name != "reference/api.md":
                found = "reference/api.md"
            if not posixpath.splitext(found)[1]:
                index = {"decisions": "decisions/0001-record.md", "errors": "errors/README.md"}
                found = index.get(found, found)
            return f"[{text}]({posixpath.relpath(found, site or '.')}{mark}{anchor})"
        # The rules of the repository check that the file exists.
        return text if (ROOT / found).exists() else match.group()

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(content, page, config, files):
    content = re.sub(r"<table>", '<div class="table"><table>', content)
    content = content.replace("</table>", "</table></div>")
    here = posixpath.dirname(page.file.src_uri)
    add_to_index(content, page)

    def picture(match):
        source = re.search(r'src="([^"]+)"', match.group())[1]
        file = DOCS / posixpath.normpath(posixpath.join(here, source))
        if not file.is_file() or "concepts/" not in file.as_posix():
            return match.group()
        # In the page, the picture has the colours of the page.
        drawing = re.sub(r"<style>.*?</style>", "", file.read_text(), flags=re.DOTALL)
        return f'<span class="picture">{drawing}</span>'

    return re.sub(r"<img [^>]*\.svg[^>]*>", picture, content)


def add_to_index(content, page):
    """Adds the page and each of its sections to the search index."""
    parts = HEADING.split(re.sub(r'<a class="headerlink".*?</a>', "", content))
    location, title = page.url, page.title
    for at in range(0, len(parts), 4):
        text = " ".join(html.unescape(re.sub(r"<(/?\w+)[^>]*>", lambda tag: "" if tag[1].strip("/") in INLINE else " ", parts[at])).split())
        INDEX.append([location, title, text])
        if at + 4 < len(parts):
            location, title = f"{page.url}#{parts[at + 2]}", html.unescape(re.sub(r"<[^>]+>", "", parts[at + 3])).strip()


def on_post_build(config):
    """Writes the search index, as a script: pages opened from a directory can load it as well. Checks what pages load."""
    site = Path(config.site_dir)
    (site / "search_index.js").write_text(f"searchIndex = {json.dumps(INDEX, ensure_ascii=False)};\n")
    for file in [*site.rglob("*.html"), site / "site.css"]:
        for address in LOADED.findall(file.read_text()):
            LOG.warning(f"{file.relative_to(site)} loads {address} from another host")


def states_page():
    text = [
        "# State machines\n",
        "What each status may become. Under each status are the events that it accepts, the status that follows, and the reason; then",
        "the events that it refuses. Generated from the code.\n",
    ]
    for file in sorted((DOCS / "transitions").glob("*.txt")):
        # The first lines are the name, a sentence and a remark for editors.
        name, about, *rest = file.read_text().rstrip().split("\n")
        table = "\n".join(line for line in rest if not line.startswith("Generated ")).strip()
        text.append(f"\n## {name}\n\n{about}\n\n```text\n{table}\n```\n")
    return "\n".join(text)


def api_page(document):
    """Every operation of the OpenAPI document, by the first parts of its path."""
    groups = {}
    for path, methods in document["paths"].items():
        parts = [part for part in path.split("/") if part and part != "api" and not part.startswith("{")]
        if parts[0] == "project" and len(parts) > 1:
            parts = parts[1:]
        for method, operation in methods.items():
            groups.setdefault(parts[0], []).append((path, method, operation))
    text = [
        "# API\n",
        "Every operation of the HTTP API, generated from [the OpenAPI document](../api/openapi.json), which also has the",
        "complete schemas of responses. Requests carry `Authorization: Bearer TOKEN`. [Rights](rights.md) explains who may call an",
        "operation, [request fields](api-fields.md) what each field does. The API of the container queue is described",
        "[there](../container-queue.md#api).\n",
    ]
    for group, operations in groups.items():
        text.append(f"\n## {group}\n")
        for path, method, operation in operations:
            text.append(f"### {operation['operationId']}\n")
            text.append(f"`{method.upper()} {path}` · access: `{operation['x-access']}`\n")
            text.append(f"{operation['summary']}\n")
            rows = []
            for parameter in operation.get("parameters", []):
                if parameter["in"] != "path":
                    rows.append((f"{parameter['name']} ({parameter['in']})", parameter["schema"], parameter.get("required")))
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                schema = content["schema"]
                if kind != "application/json":
                    text.append(f"Body: `{kind}`.\n")
                required = schema.get("required", [])
                for name, field in schema.get("properties", {}).items():
                    rows.append((name, field, name in required))
            if rows:
                text.append("| field | type | |\n| --- | --- | --- |")
                for name, field, required in rows:
                    about = field.get("description", "").replace("|", "\\|").replace("\n", " ")
                    about = (f"{about} " if about else "") + ("Required." if required else "")
                    text.append(f"| `{name}` | {type_of(field)} | {about.strip()} |")
                text.append("")
            success = next((body for status, body in operation["responses"].items() if status.startswith("2")), {})
            for kind, content in success.get("content", {}).items():
                fields = ", ".join(f"`{name}`" for name in content["schema"].get("properties", {}))
                shape = type_of(content["schema"]) + (f" with {fields}" if fields else "")
                text.append(f"Response: {shape}{'' if kind == 'application/json' else f' ({kind})'}.\n")
    return "\n".join(text)


def type_of(schema):
    """A short name of a schema."""
    if "enum" in schema:
        return ", ".join(f"`{html.escape(json.dumps(value))}`" for value in schema["enum"]).replace("|", "\\|")
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(type_of(one) for one in schema[word]))
    kind = schema.get("type", "any")
    kinds = [kind] if isinstance(kind, str) else kind
    names = []
    for kind in kinds:
        if kind == "array":
            names.append(f"list of {type_of(schema.get('items', {}))}")
        elif kind == "string" and "format" in schema:
            names.append(schema["format"])
        else:
            names.append(kind)
    return " or ".join(names)
