"""The page's style sheet, kept in Python so that it travels with the package and into the page."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f4f6f8; --card: #ffffff; --text: #1c2430; --muted: #5d6878; --line: #dfe4ea;
  --soft: #f0f3f6; --accent: #0072b2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1317; --card: #171c23; --text: #e4e8ee; --muted: #9aa5b4; --line: #2c343f; --soft: #1e252e;
    --accent: #56b4e9;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
}
main, header > div { max-width: 1200px; margin: 0 auto; padding: 0 20px; }
header { background: var(--card); border-bottom: 1px solid var(--line); padding: 28px 0 18px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 12px; }
h3, caption { font-size: 15px; font-weight: 600; margin: 0; padding: 0 0 8px; text-align: left; }
p { margin: 0 0 12px; max-width: 76ch; }
a { color: var(--accent); }
.lead { color: var(--muted); overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 14px; margin-top: 14px; }
nav a { text-decoration: none; white-space: nowrap; }
nav a:hover { text-decoration: underline; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px 22px;
  margin: 16px 0 0; }
.facts dt { color: var(--muted); font-size: 12.5px; }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; margin: 16px 0 0; padding: 0;
  font-size: 14px; }
.legend li { overflow-wrap: anywhere; }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 20px 0; padding: 20px 22px;
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 11px 6px 0; text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; font-size: 12.5px; vertical-align: bottom; }
thead tr:last-child th { border-bottom: 1.5px solid var(--line); }
tbody td, tbody th { border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
tbody tr:hover > * { background: var(--soft); }
tbody th { color: var(--text); font-weight: 500; font-size: 13.5px; }
th.span { text-align: center; border-bottom: 1px solid var(--line); padding-right: 14px; }
.words { text-align: left; }
td.wide, th.wide { white-space: normal; overflow-wrap: anywhere; min-width: 12ch; max-width: 46ch; text-align: left; }
.best { font-weight: 700; }
.note { color: var(--muted); font-size: 13px; margin: 8px 0 0; max-width: 100ch; }
.table + .table { margin-top: 26px; }
figure { margin: 0; }
figure + figure { margin-top: 26px; }
figure img { display: block; width: 100%; height: auto; border-radius: 6px; }
figcaption { color: var(--muted); font-size: 13.5px; margin: 8px 0 0; max-width: 100ch; }
figure + .table { margin-top: 26px; }
.named { position: relative; display: inline-block; padding-left: 38px; max-width: 44ch; }
.named { white-space: normal; overflow-wrap: break-word; }
svg.line { position: absolute; left: 0; top: 0.5em; width: 30px; height: 10px; overflow: visible; }
.warn { border-left: 4px solid #e69f00; padding: 8px 14px; background: var(--soft); border-radius: 4px; }
.remarks { margin: 14px 0 0; padding-left: 20px; overflow-wrap: anywhere; }
code, pre { font: 13px/1.5 ui-monospace, "Cascadia Mono", Menlo, "DejaVu Sans Mono", monospace; }
pre { overflow-x: auto; background: var(--soft); padding: 14px; border-radius: 6px; margin: 0; }
details { margin-top: 16px; }
summary { cursor: pointer; color: var(--accent); margin-bottom: 10px; }
footer { color: var(--muted); font-size: 13px; margin: 0 0 32px; }
@media print { section { break-inside: avoid; } nav { display: none; } }
"""
