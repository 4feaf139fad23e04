//! The HTML page of a routed text: markup, style and script in one file that loads nothing else.
//!
//! The text is part of the HTML, coloured by each token's first choice in the first MoE layer, so that it can be read
//! without the script. The script changes the colours when the reader chooses another layer. Its data is embedded as
//! JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::palette::palette;
use super::routed::{RoutedLayer, RoutedText};
use super::text::visible;
use crate::report::{Unit, escape, grouped, short};

/// The number of tokens listed for an expert.
const TOP_TOKENS: usize = 6;
/// The most experts for which the cells of the load table show a percentage.
const MAX_LABELLED: usize = 16;
/// The load, in multiples of the even share, at which a cell of the load table has its full colour.
const FULL_LOAD: f64 = 3.0;

/// Renders the page. `name` is the model's name; the `facts` are shown below it.
#[must_use]
pub fn routing_page(text: &RoutedText, name: &str, facts: &[String]) -> String {
    let name = escape(name);
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\
         <title>{name} · Moeworks routing</title>\n<style>{}{}</style></head>\n<body><main>",
        include_str!("page.css"),
        colours(text.num_experts)
    );
    let facts: Vec<String> = facts.iter().map(|fact| escape(fact)).collect();
    let _ = write!(
        html,
        "<header><svg viewBox=\"0 0 36 36\" aria-hidden=\"true\"><rect x=\"2\" y=\"2\" width=\"14\" height=\"14\" rx=\"4\"/>\
         <rect class=\"hot\" x=\"20\" y=\"2\" width=\"14\" height=\"14\" rx=\"4\"/><rect x=\"2\" y=\"20\" width=\"14\" \
         height=\"14\" rx=\"4\"/><rect x=\"20\" y=\"20\" width=\"14\" height=\"14\" rx=\"4\"/></svg>\
         <div><p>Moeworks routing</p><h1>{name}</h1><p>{}</p></div></header>",
        facts.join(" · ")
    );
    html += &controls(text);
    html += &columns(text);
    html += &load_table(text);
    html += "<section class=\"card\"><h2 id=\"top-title\">Tokens that stand out</h2><p class=\"note\">For each expert the \
             tokens of which it gets the most beyond its share, and how many of their occurrences.</p><div id=\"top\"></div>\
             <p class=\"note\" id=\"top-none\"></p></section>";
    if text.layers.len() > 1 {
        html += "<section class=\"card\" id=\"flow\"><h2 id=\"flow-title\">From layer to layer</h2><p class=\"note\">Where the \
                 tokens of each expert go next, by first choices.</p><div id=\"flow-box\"></div></section>";
    }
    html += "<footer>Made by <b>moeworks routing</b>. Arrow keys change the layer; Escape shows all experts.</footer></main>\
             <div class=\"pop\" id=\"pop\" hidden></div>";
    // Every "<" in the data is escaped, so that a text cannot end the script element.
    let data = data(text).to_string().replace('<', "\\u003c");
    let _ = write!(html, "<script type=\"application/json\" id=\"data\">{data}</script>");
    let _ = writeln!(html, "<script>{}</script></body></html>", include_str!("page.js"));
    html
}

/// Renders the style sheet's variables and classes: one of each for an expert.
fn colours(num_experts: usize) -> String {
    let (mut light, mut dark, mut classes) = (String::new(), String::new(), String::new());
    for (expert, shade) in palette(num_experts).into_iter().enumerate() {
        let [[lr, lg, lb], [dr, dg, db]] = [shade.light, shade.dark];
        let _ = write!(light, "--e{expert}:#{lr:02x}{lg:02x}{lb:02x};");
        let _ = write!(dark, "--e{expert}:#{dr:02x}{dg:02x}{db:02x};");
        let _ = writeln!(classes, ".e{expert}{{background-color:var(--e{expert})}}");
    }
    format!(":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{classes}")
}

fn controls(text: &RoutedText) -> String {
    let mut html = String::from("<div class=\"bar\"><div role=\"group\" aria-label=\"layer\"><span>Layer</span>");
    for (at, layer) in text.layers.iter().enumerate() {
        let _ = write!(html, "<button data-layer=\"{at}\" aria-pressed=\"{}\">{}</button>", at == 0, layer.layer);
    }
    html += "</div>";
    let slots = slots(text);
    if slots > 1 {
        html += "<div role=\"group\" aria-label=\"choice\"><span>Coloured by choice</span>";
        for slot in 0..slots {
            let _ = write!(html, "<button data-slot=\"{slot}\" aria-pressed=\"{}\">{}</button>", slot == 0, slot + 1);
        }
        html += "</div>";
    }
    html + "<div><button id=\"all\" hidden>Show all experts</button></div></div>"
}

/// Renders the text and, beside it, the legend of the experts.
fn columns(text: &RoutedText) -> String {
    // Single characters are set close together; longer tokens get a little space between them.
    let is_characters = text.pieces.iter().all(|piece| piece.text.chars().count() <= 1);
    let mut html = format!(
        "<div class=\"columns\"><section class=\"card\"><h2>Text</h2><p class=\"note\" id=\"layer-note\">{}</p>\
         <div id=\"text\"{} dir=\"auto\">",
        layer_note(&text.layers[0]),
        if is_characters { "" } else { " class=\"tokens\"" }
    );
    for piece in &text.pieces {
        let first = text.layers[0].choices[piece.tokens.start].first();
        let class = first.map_or_else(|| "none".to_owned(), |choice| format!("e{}", choice.expert));
        let shown: String = if piece.text.is_empty() {
            escape(&text.labels[&text.token_ids[piece.tokens.start]])
        } else {
            // A newline is shown as a sign and still ends the line.
            escape(&piece.text.chars().map(visible).collect::<String>()).replace('\n', "↵\n")
        };
        let _ = write!(html, "<i class=\"{class}\">{shown}</i>");
    }
    let many = if text.num_experts > MAX_LABELLED { " class=\"many\"" } else { "" };
    let _ = write!(
        html,
        "</div></section><section class=\"card\"><h2>Experts</h2><p class=\"note\">Share of the choices; click to see one \
         alone.</p><div id=\"legend\"{many}></div></section></div>"
    );
    html
}

fn layer_note(layer: &RoutedLayer) -> String {
    let dropped = layer.drop_rate();
    let dropped = if dropped > 0.0 {
        format!("{} of the choices were dropped (struck out).", short(dropped, Unit::Percent))
    } else {
        "No choice was dropped.".to_owned()
    };
    format!("Each token in the colour of its expert in layer {}. {dropped}", layer.layer)
}

/// Renders the table of loads: a row for each MoE layer, a column for each expert.
fn load_table(text: &RoutedText) -> String {
    let num_experts = text.num_experts;
    let is_labelled = num_experts <= MAX_LABELLED;
    let mut html = format!(
        "<section class=\"card\"><h2>Load of each expert in each layer</h2><p class=\"note\">Share of a layer's choices; even is \
         {}.</p><div class=\"scroll\"><table class=\"loads{}\" style=\"--experts:{num_experts}\"><tr><th>Layer</th>",
        short(1.0 / num_experts as f64, Unit::Percent),
        if is_labelled { "" } else { " many" }
    );
    for expert in 0..num_experts {
        let label = if is_labelled || expert % 8 == 0 { expert.to_string() } else { String::new() };
        let _ = write!(html, "<th>{label}</th>");
    }
    html += "</tr>";
    for (at, layer) in text.layers.iter().enumerate() {
        let loads = layer.tokens_per_expert(num_experts);
        let total = loads.iter().sum::<u64>();
        let _ = write!(html, "<tr><th>layer {}</th>", layer.layer);
        for (expert, &load) in loads.iter().enumerate() {
            let share = moeworks_moe::share(load, total);
            let ratio = share * num_experts as f64;
            let strength = if ratio > 0.0 { (ratio.ln() / FULL_LOAD.ln()).abs().min(1.0) } else { 1.0 };
            let side = if ratio >= 1.0 { "hot" } else { "cold" };
            let label = if is_labelled { short(share, Unit::Percent) } else { String::new() };
            let _ = write!(
                html,
                "<td class=\"{side}\" style=\"--a:{strength:.2}\" data-at=\"{at}\" data-expert=\"{expert}\" title=\"layer {}, \
                 expert {expert}: {} choices, {ratio:.2} of the even share\">{label}</td>",
                layer.layer,
                grouped(load)
            );
        }
        html += "</tr>";
    }
    let full = short(FULL_LOAD, Unit::Plain);
    let _ = write!(html, "</table></div><div class=\"scale\">≤ 1/{full}<i></i>≥ {full} even shares</div></section>");
    html
}

/// Returns the largest number of choices of a token.
fn slots(text: &RoutedText) -> usize {
    text.layers.iter().flat_map(|layer| &layer.choices).map(Vec::len).max().unwrap_or(0).max(1)
}

fn data(text: &RoutedText) -> Value {
    let slots = slots(text);
    let layers: Vec<Value> = text
        .layers
        .iter()
        .map(|layer| {
            let top = layer.top_tokens(&text.token_ids, text.num_experts, TOP_TOKENS);
            let top: Vec<Vec<[u64; 3]>> = top
                .iter()
                .map(|tokens| tokens.iter().map(|t| [u64::from(t.id), t.count, t.occurrences]).collect())
                .collect();
            json!({ "n": layer.layer, "c": flat_choices(layer, slots), "top": top, "note": layer_note(layer) })
        })
        .collect();
    let pieces: Vec<[usize; 2]> = text.pieces.iter().map(|piece| [piece.tokens.start, piece.tokens.len()]).collect();
    let labels: serde_json::Map<String, Value> =
        text.labels.iter().map(|(id, label)| (id.to_string(), Value::from(label.as_str()))).collect();
    json!({
        "experts": text.num_experts, "slots": slots, "tokens": text.token_ids, "labels": labels, "pieces": pieces,
        "layers": layers,
    })
}

/// Lists two numbers for each slot of each token: its expert (-1 for an empty slot), and its weight in thousandths
/// (-1 minus that weight for a dropped choice).
fn flat_choices(layer: &RoutedLayer, slots: usize) -> Vec<i64> {
    let slot = |choices: &[super::Choice], slot: usize| match choices.get(slot) {
        None => [-1, 0],
        Some(choice) => {
            let weight = (f64::from(choice.weight) * 1000.0).round().max(0.0) as i64;
            [i64::from(choice.expert), if choice.is_dropped { -1 - weight } else { weight }]
        }
    };
    layer.choices.iter().flat_map(|choices| (0..slots).flat_map(|at| slot(choices, at)).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
