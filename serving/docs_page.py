"""The page /docs: an OpenAPI schema as plain HTML. It has no scripts and loads nothing, so that it works offline."""

import html
from typing import Any


STYLE = """body {font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem}
h2 {margin-top: 2.5rem} table {border-collapse: collapse} td {padding: .1rem 1.5rem .1rem 0; vertical-align: top}
form {margin: 1rem 0; padding: 1rem; background: #8882} input {margin: .3rem 0; width: 100%}"""
TRY_IT = """<form method="post" action="{path}" enctype="multipart/form-data">
<label>image <input type="file" name="image" required></label>
<label>question <input name="questions" value="Is there a car?" required></label>
<button>Try it</button></form>
<pre>curl -F image=@frame.jpg -F "questions=Is it wet?" -F "questions=Is there a car?" localhost:8000{path}</pre>"""


def _fields(schema: dict[str, Any]) -> str:
    """The fields of a JSON object, with their types."""
    rows = []
    for name, field in schema.get("properties", {}).items():
        kinds = [field, *field.get("anyOf", [])]
        kind = " or ".join(one["type"] for one in kinds if one.get("type", "null") != "null")
        needed = "required" if name in schema.get("required", ()) else ""
        rows.append(f"<tr><td><code>{html.escape(name)}</code></td><td>{kind}</td><td>{needed}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def describe_routes(schema: dict[str, Any]) -> str:
    """Return a page with the routes of an OpenAPI schema, what they take and return, and a form to try each POST."""
    parts = []
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(route.get('description', route.get('summary', '')))}</p>")
            for content_type, body in route.get("requestBody", {}).get("content", {}).items():
                parts.append(f"<p>Body as <code>{content_type}</code>:</p>{_fields(body['schema'])}")
            if method == "post":
                parts.append(TRY_IT.format(path=html.escape(path)))
            statuses = (
                f"<tr><td>{status}</td><td>{html.escape(response.get('description', ''))}</td></tr>"
                for status, response in sorted(route["responses"].items())
            )
            parts.append(f"<table>{''.join(statuses)}</table>")
    title = html.escape(schema["info"]["title"])
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    intro = f"<h1>{title}</h1><p>{html.escape(schema['info'].get('description', ''))}</p>"
    return f'{head}{intro}{"".join(parts)}<p>For programs: <a href="/openapi.json">/openapi.json</a></p></html>'
