//! The HTML page of recorded routing: a table and pictures in one file that loads nothing and runs no script.

use std::fmt::Write as _;

use moeworks_plan::ForecastMethod;

use super::{RecordStats, RecordedLayer};
use crate::report::escape;

/// The layers whose course over time is shown at most.
const MAX_COURSES: usize = 12;
/// The experts and windows of such a picture at most.
const MAX_CELLS: [usize; 2] = [48, 50];
/// The experts of the table of loads at most.
const MAX_EXPERTS: usize = 256;
/// The size of a picture.
const SIZE: [f64; 2] = [440.0, 240.0];
/// The space around a picture's field: left, top, right, bottom.
const MARGIN: [f64; 4] = [44.0, 8.0, 8.0, 30.0];

/// Renders the page. `facts` are shown below the model's name.
#[must_use]
pub fn stats_page(stats: &RecordStats, facts: &[String]) -> String {
    let name = escape(&stats.header.model);
    let facts: Vec<String> = facts.iter().map(|fact| escape(fact)).collect();
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>{name} · Moeworks routing</title>\n<style>{}{}</style></head>\n<body><main><header><div>\
         <p>Moeworks routing</p><h1>{name}</h1><p>{}</p></div></header>",
        include_str!("../page.css"),
        include_str!("page.css"),
        facts.join(" · ")
    );
    html += &card(
        "Layers",
        "How concentrated each layer is, how stable, and how well it is foretold.",
        &layer_table(stats),
    );
    html += &card("Load of each expert", "In multiples of the even share: orange is more, blue less.", &loads(stats));
    if stats.layers.iter().any(|layer| layer.on_ranks.is_some()) {
        let note = "Choices that each rank computes, in multiples of the even share.";
        html += &card("Load of each rank of the placement", note, &rank_loads(stats));
    }
    html += "<div class=\"pictures\">";
    html += &card(
        "Load by rank",
        "Each layer's experts from the busiest to the idlest, both axes logarithmic.",
        &by_rank(stats),
    );
    if stats.layers.iter().any(|layer| !layer.forecasts.is_empty()) {
        let note = "Mean error of each method over the layers; the dashed line is what sampling alone gives.";
        html += &card("The next window foretold", note, &forecasts(stats));
    }
    if stats.layers.iter().any(|layer| layer.next_layer.is_some()) {
        let note = "Tokens whose likeliest expert in the next layer is one of theirs; pale: the commonest expert.";
        html += &card("The next layer foretold", note, &next_layers(stats));
    }
    html += "</div>";
    html += &courses(stats);
    html += &pairs(stats);
    html + "<footer>Made by <b>moeworks routing stats</b>.</footer></main></body></html>\n"
}

fn card(title: &str, note: &str, content: &str) -> String {
    format!(
        "<section class=\"card\"><h2>{title}</h2><p class=\"note\">{note}</p><div class=\"scroll\">{content}</div></section>"
    )
}

/// Formats a figure, or a dash for one that is not known.
fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.3}"))
}

fn layer_table(stats: &RecordStats) -> String {
    let heads = [
        "Layer",
        "max / mean",
        "top 1",
        "top tenth",
        "entropy",
        "Gini",
        "Zipf",
        "change",
        "by sampling",
        "drift",
        "next layer",
        "base",
        "repeats",
        "base",
    ];
    let mut html = String::from("<table class=\"stats\"><tr>");
    for head in heads {
        let _ = write!(html, "<th>{head}</th>");
    }
    html += "</tr>";
    for layer in &stats.layers {
        let of = &layer.concentration;
        let cells = [
            Some(of.max_over_mean),
            Some(of.top_1),
            Some(of.top_tenth),
            Some(of.entropy),
            Some(of.gini),
            of.zipf,
            layer.stability.map(|stability| stability.change),
            layer.stability.map(|stability| stability.sampling),
            layer.stability.map(|stability| stability.drift),
            layer.next_layer.map(|next| next.top_1),
            layer.next_layer.map(|next| next.top_1_base),
            layer.repeats.map(|repeats| repeats.share),
            layer.repeats.map(|repeats| repeats.base),
        ];
        let _ = write!(html, "<tr><td>{}</td>", layer.layer);
        for cell in cells {
            let _ = write!(html, "<td>{}</td>", figure(cell));
        }
        html += "</tr>";
    }
    html + "</table>"
}

/// Returns the colour of a share in multiples of the even one, as an SVG or CSS fill.
fn colour(ratio: f64) -> String {
    let strength = if ratio > 0.0 { (ratio.ln() / 4.0_f64.ln()).abs().min(1.0) } else { 1.0 };
    let side = if ratio >= 1.0 { "hot" } else { "cold" };
    format!("color-mix(in srgb, var(--{side}) {:.0}%, var(--card))", 90.0 * strength)
}

/// Draws the loads: a row for each layer, a cell for each expert.
fn loads(stats: &RecordStats) -> String {
    let of_experts = |layer: &RecordedLayer| layer.chosen.iter().map(|&load| load as f64).collect();
    cells(&stats.layers, "expert", of_experts)
}

/// Draws the loads of ranks: a row for each layer, a cell for each rank.
fn rank_loads(stats: &RecordStats) -> String {
    cells(&stats.layers, "rank", |layer| layer.on_ranks.as_ref().map_or_else(Vec::new, |load| load.ranks.clone()))
}

/// Draws a row for each layer, with a cell for each of its loads.
fn cells(layers: &[RecordedLayer], what: &str, loads: impl Fn(&RecordedLayer) -> Vec<f64>) -> String {
    let all: Vec<Vec<f64>> = layers.iter().map(loads).collect();
    let count = all.iter().map(Vec::len).max().unwrap_or(0).clamp(1, MAX_EXPERTS);
    let (cell, left) = ((1200.0 / count as f64).clamp(4.0, 26.0), 64.0);
    let (width, height) = (left + cell * count as f64, 18.0 * layers.len() as f64);
    let mut svg = svg_of(width, height, &format!("load of each {what} in each layer"));
    for (row, (layer, loads)) in layers.iter().zip(&all).enumerate() {
        let (y, layer) = (18.0 * row as f64, layer.layer);
        let _ = write!(svg, "<text x=\"0\" y=\"{:.1}\">layer {layer}</text>", y + 13.0);
        let total: f64 = loads.iter().sum();
        for (place, &load) in loads.iter().take(count).enumerate() {
            let ratio = if total > 0.0 { load / total * loads.len() as f64 } else { 0.0 };
            let _ = write!(
                svg,
                "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"17\" style=\"fill:{}\"><title>layer {layer}, {what} \
                 {place}: {load:.0} choices, {ratio:.2} even shares</title></rect>",
                left + cell * place as f64,
                cell - 1.0,
                colour(ratio)
            );
        }
    }
    svg + "</svg>"
}

fn svg_of(width: f64, height: f64, label: &str) -> String {
    format!("<svg viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{label}\">")
}

/// A picture's field with axes: maps shares of its width and height to places.
struct Field {
    svg: String,
}

impl Field {
    fn new(label: &str) -> Self {
        let mut svg = svg_of(SIZE[0], SIZE[1], label);
        let ([x0, y0], [x1, y1]) = (Self::place(0.0, 0.0), Self::place(1.0, 1.0));
        let _ = write!(svg, "<path class=\"axis\" d=\"M{x0:.1} {y1:.1}V{y0:.1}H{x1:.1}\"/>");
        Self { svg }
    }

    fn place(x: f64, y: f64) -> [f64; 2] {
        let [left, top, right, bottom] = MARGIN;
        [left + x * (SIZE[0] - left - right), SIZE[1] - bottom - y * (SIZE[1] - top - bottom)]
    }

    /// Labels a place of the left axis.
    fn left(&mut self, y: f64, text: &str) {
        let [x, y] = Self::place(0.0, y);
        let _ = write!(self.svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>", x - 5.0, y + 4.0);
    }

    /// Labels a place of the lower axis.
    fn below(&mut self, x: f64, text: &str) {
        let [x, y] = Self::place(x, 0.0);
        let _ = write!(self.svg, "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>", y + 15.0);
    }

    fn line(&mut self, points: impl Iterator<Item = [f64; 2]>, title: &str) {
        let points: Vec<String> =
            points.map(|[x, y]| Self::place(x, y)).map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(
            self.svg,
            "<polyline class=\"line\" points=\"{}\"><title>{title}</title></polyline>",
            points.join(" ")
        );
    }

    /// Draws a bar from the lower axis; `x` is its left edge.
    fn bar(&mut self, class: &str, [x, width, height]: [f64; 3], title: &str) {
        let ([left, top], [right, bottom]) = (Self::place(x, height), Self::place(x + width, 0.0));
        let _ = write!(
            self.svg,
            "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{title}</title></rect>",
            (right - left).max(0.5),
            (bottom - top).max(0.0)
        );
    }

    fn end(self) -> String {
        self.svg + "</svg>"
    }
}

/// Draws each layer's loads in descending order, both axes logarithmic.
fn by_rank(stats: &RecordStats) -> String {
    let mut field = Field::new("load by rank");
    let count = stats.header.num_experts.max(2) as f64;
    // From a thousandth of the even share to all choices.
    let (low, high) = ((1e-3_f64).ln(), count.ln());
    for layer in &stats.layers {
        let total: f64 = layer.chosen.iter().map(|&load| load as f64).sum();
        let mut loads: Vec<f64> = layer.chosen.iter().map(|&load| load as f64).filter(|&load| load > 0.0).collect();
        loads.sort_by(|a, b| b.total_cmp(a));
        let height = |load: f64| (((load / total * count).ln() - low) / (high - low)).clamp(0.0, 1.0);
        let points = loads.iter().zip(1..).map(|(&load, rank)| [f64::from(rank).ln() / count.ln(), height(load)]);
        field.line(points, &format!("layer {}: Zipf exponent {}", layer.layer, figure(layer.concentration.zipf)));
    }
    for ratio in [0.001, 0.01, 0.1, 1.0, 10.0, 100.0].into_iter().filter(|&ratio| ratio <= count) {
        field.left((f64::ln(ratio) - low) / (high - low), &format!("{ratio}"));
    }
    field.below(0.0, "1");
    field.below(1.0, &format!("{count}"));
    field.below(0.5, "rank; left: even shares");
    field.end()
}

/// Draws the mean error of each method over the layers, with that of sampling.
fn forecasts(stats: &RecordStats) -> String {
    let mean = |values: Vec<f64>| {
        if values.is_empty() { None } else { Some(values.iter().sum::<f64>() / values.len() as f64) }
    };
    let error_of = |method: ForecastMethod| {
        let errors = stats.layers.iter().flat_map(|layer| &layer.forecasts);
        mean(errors.filter(|error| error.method == method).map(|error| error.mean).collect())
    };
    let sampling = mean(stats.layers.iter().filter_map(|layer| layer.forecast_sampling).collect());
    let errors: Vec<(ForecastMethod, f64)> =
        ForecastMethod::ALL.into_iter().filter_map(|method| Some((method, error_of(method)?))).collect();
    let most = errors.iter().map(|(_, error)| *error).chain(sampling).fold(1e-9, f64::max);
    let mut field = Field::new("errors of forecasts");
    for (place, (method, error)) in errors.iter().enumerate() {
        let x = (place as f64 + 0.15) / errors.len() as f64;
        let name = method.name();
        field.bar("bar", [x, 0.7 / errors.len() as f64, error / most], &format!("{name}: {error:.4}"));
        field.below(x + 0.35 / errors.len() as f64, name);
    }
    if let Some(sampling) = sampling {
        let ([x0, y], [x1, _]) = (Field::place(0.0, sampling / most), Field::place(1.0, 0.0));
        let _ = write!(
            field.svg,
            "<path class=\"mark\" d=\"M{x0:.1} {y:.1}H{x1:.1}\"><title>sampling: {sampling:.4}</title></path>"
        );
    }
    field.left(0.0, "0");
    field.left(1.0, &format!("{most:.3}"));
    field.end()
}

/// Draws how well the next layer's choices are foretold, a pair of bars a layer.
fn next_layers(stats: &RecordStats) -> String {
    let mut field = Field::new("accuracy of foretelling the next layer");
    let count = stats.layers.len().max(1) as f64;
    for (place, layer) in stats.layers.iter().enumerate() {
        let Some(next) = layer.next_layer else { continue };
        let x = (place as f64 + 0.1) / count;
        let title = |name: &str, share: f64| format!("after layer {}: {name} {:.1}%", layer.layer, 100.0 * share);
        field.bar("bar", [x, 0.4 / count, next.top_1], &title("foretold", next.top_1));
        field.bar("base", [x + 0.4 / count, 0.4 / count, next.top_1_base], &title("commonest", next.top_1_base));
        if stats.layers.len() <= 16 || place.is_multiple_of(8) {
            field.below(x + 0.4 / count, &layer.layer.to_string());
        }
    }
    for share in [0.0, 0.5, 1.0] {
        field.left(share, &format!("{:.0}%", 100.0 * share));
    }
    field.end()
}

/// Draws the course of the busiest experts' shares over time.
fn courses(stats: &RecordStats) -> String {
    let shown = stats.layers.iter().filter(|layer| layer.course.len() > 1).take(MAX_COURSES);
    let pictures: Vec<String> = shown
        .map(|layer| {
            let note = "Rows: the busiest experts. Columns: windows of time, first to last.";
            card(&format!("Layer {} over time", layer.layer), note, &course(layer))
        })
        .collect();
    if pictures.is_empty() { String::new() } else { format!("<div class=\"pictures\">{}</div>", pictures.concat()) }
}

fn course(layer: &RecordedLayer) -> String {
    let [max_experts, max_windows] = MAX_CELLS;
    let mut order: Vec<usize> = (0..layer.chosen.len()).collect();
    order.sort_by_key(|&expert| (std::cmp::Reverse(layer.chosen[expert]), expert));
    order.truncate(max_experts);
    let step = layer.course.len().div_ceil(max_windows);
    let windows: Vec<&Vec<f64>> = layer.course.iter().step_by(step).collect();
    let (width, height, left) = (400.0 / windows.len() as f64, (240.0 / order.len() as f64).clamp(5.0, 16.0), 36.0);
    let mut svg = svg_of(left + 400.0, height * order.len() as f64, "shares of experts over time");
    for (row, &expert) in order.iter().enumerate() {
        let y = height * row as f64;
        if height >= 10.0 || row.is_multiple_of(4) {
            let _ = write!(svg, "<text x=\"0\" y=\"{:.1}\">{expert}</text>", y + height.min(12.0) - 1.0);
        }
        for (column, shares) in windows.iter().enumerate() {
            let ratio = shares[expert] * layer.chosen.len() as f64;
            let _ = write!(
                svg,
                "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" style=\"fill:{}\"/>",
                left + width * column as f64,
                colour(ratio)
            );
        }
    }
    svg + "</svg>"
}

fn pairs(stats: &RecordStats) -> String {
    let mut html =
        String::from("<table class=\"stats\"><tr><th>Layer</th><th>experts</th><th>of tokens</th><th>lift</th></tr>");
    let mut has_any = false;
    for layer in &stats.layers {
        for pair in layer.pairs.iter().take(3) {
            has_any = true;
            let _ = write!(
                html,
                "<tr><td>{}</td><td>{} and {}</td><td>{:.1}%</td><td>{:.2}</td></tr>",
                layer.layer,
                pair.first,
                pair.second,
                100.0 * pair.share,
                pair.lift
            );
        }
    }
    let note = "The pairs that most tokens choose; the lift is over independent choices.";
    if has_any { card("Chosen together", note, &(html + "</table>")) } else { String::new() }
}
