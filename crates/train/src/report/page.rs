//! The report page: summary, charts, experts, samples and settings.

use std::fmt::Write as _;

use super::chart::{Chart, Line};
use super::data::{LayerLoad, Point, RunData};
use super::heat::{HeatMaps, MAX_MAPS};
use super::numbers::{Unit, bytes, duration, grouped, short};
use crate::metrics::{LayerRecord, Sample, router_loss_name};

/// The most layers that get a line each in a chart; of more, the mean and the range are drawn.
const MAX_LINES: usize = 8;
/// The most rows of the table of layers.
const MAX_TABLE_ROWS: usize = 200;
/// The most samples shown: the first and the newest.
const MAX_SAMPLES: usize = 8;
/// The most characters shown of a sample.
const MAX_SAMPLE_CHARS: usize = 1_500;

pub(super) const BLUE: &str = "var(--c1)";
pub(super) const ORANGE: &str = "var(--c2)";
pub(super) const GREEN: &str = "var(--c3)";
pub(super) const VIOLET: &str = "var(--c4)";

/// A chart with a line for each MoE layer.
struct LayerFigure {
    title: &'static str,
    /// The name of the scalar within the layer.
    key: &'static str,
    unit: Unit,
    /// The explanation below the title; `{ln E}` is replaced by the entropy of a uniform router.
    note: &'static str,
    /// True if only some steps have the figure; the line then connects those.
    is_occasional: bool,
}

impl LayerFigure {
    const fn new(title: &'static str, key: &'static str, unit: Unit, note: &'static str) -> Self {
        Self { title, key, unit, note, is_occasional: false }
    }

    const fn occasional(mut self) -> Self {
        self.is_occasional = true;
        self
    }

    fn line(&self, name: impl Into<String>, colour: impl Into<String>, mut points: Vec<Point>) -> Line {
        if self.is_occasional {
            points.retain(|point| point.1.is_finite());
        }
        let last = points.last().map_or(f64::NAN, |point| point.1);
        let mut line = Line::new(name, colour, points, last);
        line.has_dots = self.is_occasional;
        line
    }
}

/// The charts of MoE layers.
const LAYER_FIGURES: [LayerFigure; 10] = [
    LayerFigure::new("Load imbalance", "cv", Unit::Plain, "Standard deviation of the load over its mean; 0 is even."),
    LayerFigure::new("Busiest expert", "max_over_mean", Unit::Plain, "Its load over the mean load; 1 is even."),
    LayerFigure::new(
        "Router entropy",
        "router_entropy",
        Unit::Plain,
        "Mean of a token's, in nats; {ln E} is undecided.",
    ),
    LayerFigure::new(
        "Entropy of the mean",
        "mean_prob_entropy",
        Unit::Plain,
        "Of the router's mean probabilities, in nats; {ln E} is even over all tokens.",
    ),
    LayerFigure::new("Dropped tokens", "drop_rate", Unit::Percent, "Choices that found no room in their expert."),
    LayerFigure::new(
        "Rerouted tokens",
        "reroute_rate",
        Unit::Percent,
        "Choices that went to another expert, where there was room.",
    ),
    LayerFigure::new(
        "Expert diversity",
        "expert_diversity",
        Unit::Percent,
        "exp(entropy of the load) / experts; 100% is even.",
    ),
    LayerFigure::new("Router logits", "router_logit_rms", Unit::Plain, "Root mean square: their scale."),
    LayerFigure::new(
        "Specialisation",
        "specialization",
        Unit::Percent,
        "How far a token's id decides its first expert, on validation tokens; 100%: it alone does.",
    )
    .occasional(),
    LayerFigure::new(
        "Agreement with the checkpoint before",
        "checkpoint_agreement",
        Unit::Percent,
        "Share of the choices for the same validation tokens that stayed.",
    )
    .occasional(),
];

/// The sections of the configuration: each a name, and its keys and values.
pub(super) type Settings = Vec<(String, Vec<(String, String)>)>;

/// The content of the page.
pub(super) struct Page<'a> {
    /// The name of the run.
    pub(super) name: &'a str,
    /// The records of the run.
    pub(super) data: &'a RunData,
    /// The texts sampled during the run.
    pub(super) samples: &'a [Sample],
    /// The configuration of the run.
    pub(super) settings: &'a Settings,
}

/// Escapes text for HTML, between tags and in attributes. Control characters become a visible dot.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            '\n' | '\t' => safe.push(letter),
            _ if letter.is_control() => safe.push('·'),
            _ => safe.push(letter),
        }
    }
    safe
}

impl Page<'_> {
    /// Renders the complete HTML file.
    pub(super) fn html(&self) -> String {
        let name = escape(self.name);
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta name=\"color-scheme\" content=\"light dark\">\
             <meta http-equiv=\"Content-Security-Policy\" \
             content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\
             <title>{name} · Moeworks report</title>\n<style>{}</style></head>\n<body><main>",
            include_str!("style.css")
        );
        html += &self.header();
        html += &self.tiles();
        html += &self.training();
        if self.data.has_experts() {
            html += &self.experts();
        }
        html += &self.ranks();
        html += &self.sampled_texts();
        html += &self.settings_table();
        html + "<footer>Made by <b>moeworks</b> from metrics.jsonl of this run.</footer></main></body></html>\n"
    }

    fn header(&self) -> String {
        let last = &self.data.last;
        let mut facts = vec![format!("{} steps", grouped(last.step)), format!("{} tokens", grouped(last.tokens))];
        if let Some(layer) = last.layers.first() {
            let (layers, experts) = (last.layers.len(), layer.tokens_per_expert.len());
            facts.push(format!("{layers} MoE layer{} of {experts} experts", if layers == 1 { "" } else { "s" }));
        }
        if self.data.seconds > 0.0 {
            facts.push(format!("{} of training", duration(self.data.seconds)));
        }
        format!(
            "<header><svg viewBox=\"0 0 36 36\" aria-hidden=\"true\"><rect x=\"2\" y=\"2\" width=\"14\" height=\"14\" rx=\"4\"/>\
             <rect class=\"hot\" x=\"20\" y=\"2\" width=\"14\" height=\"14\" rx=\"4\"/><rect x=\"2\" y=\"20\" width=\"14\" \
             height=\"14\" rx=\"4\"/><rect x=\"20\" y=\"20\" width=\"14\" height=\"14\" rx=\"4\"/></svg>\
             <div><p>Moeworks training report</p><h1>{}</h1><p>{}</p></div></header>",
            escape(self.name),
            facts.join(" · ")
        )
    }

    fn tiles(&self) -> String {
        let data = self.data;
        let mut tiles = String::from("<section class=\"tiles\">");
        let mut tile = |label: &str, value: String, below: String| {
            let _ = write!(tiles, "<div><span>{label}</span><b>{value}</b><small>{below}</small></div>");
        };
        if let Some((_, loss)) = data.best_evaluation {
            let below = format!("perplexity {}", short(loss.exp(), Unit::Plain));
            tile("Best validation", short(loss, Unit::Plain), below);
        }
        let loss = data.series("train/loss");
        let first = loss.iter().map(|point| point.1).find(|value| value.is_finite()).unwrap_or(f64::NAN);
        tile("Training loss", short(data.last.loss, Unit::Plain), format!("from {}", short(first, Unit::Plain)));
        let rate = median(&data.series("perf/tokens_per_s"));
        let mfu = median(&data.series("perf/mfu"));
        let below = if mfu.is_finite() { format!("MFU {}", short(mfu, Unit::Percent)) } else { String::new() };
        tile("Tokens a second", short(rate, Unit::Plain), below);
        if data.has_experts() {
            let below = format!(
                "diversity {}",
                short(mean_of(&data.last.layers, LayerRecord::expert_diversity), Unit::Percent)
            );
            tile("Tokens dropped", short(data.last.drop_rate(), Unit::Percent), below);
        }
        if data.memory_peak_bytes > 0 {
            tile("Peak memory", bytes(data.memory_peak_bytes), String::new());
        }
        if data.num_skipped > 0 {
            tile("Skipped updates", grouped(data.num_skipped), "not finite".to_owned());
        }
        tiles + "</section>"
    }

    pub(super) fn chart(&self, title: &'static str, lines: Vec<Line>) -> Chart {
        Chart {
            title,
            note: String::new(),
            lines,
            unit: Unit::Plain,
            from_zero: false,
            cuts_peaks: false,
            marks: Vec::new(),
            steps: self.data.step_range(),
        }
    }

    fn training(&self) -> String {
        let data = self.data;
        let last = &data.last;
        let line = |name: &str, key: &str, colour: &str, value: f64| Line::new(name, colour, data.series(key), value);
        let mut losses = vec![line("training", "train/loss", BLUE, last.loss).noisy()];
        if let Some((_, value)) = data.last_evaluation {
            let mut validation = Line::new("validation", ORANGE, data.evaluations().to_vec(), value);
            validation.has_dots = true;
            losses.push(validation);
        }
        let mut loss = self.chart("Loss", losses);
        loss.note = "Cross-entropy in nats a token, without auxiliary losses.".to_owned();
        loss.marks = data.skipped_steps();
        // The axis includes an evaluation before the first step.
        loss.steps.0 = data.evaluations().first().map_or(loss.steps.0, |first| first.0.min(loss.steps.0));
        let mut rate = self.chart("Learning rate", vec![line("learning rate", "train/lr", GREEN, last.lr)]);
        rate.from_zero = true;
        let mut norm = self
            .chart("Gradient norm", vec![line("before clipping", "train/grad_norm", VIOLET, last.grad_norm).noisy()]);
        (norm.from_zero, norm.cuts_peaks) = (true, true);
        let speed = line("tokens a second", "perf/tokens_per_s", BLUE, last.tokens_per_s).noisy();
        let mut speed = self.chart("Throughput", vec![speed]);
        (speed.from_zero, speed.cuts_peaks) = (true, true);
        let mut mfu = self.chart("Share of the machine's peak", vec![line("MFU", "perf/mfu", GREEN, last.mfu).noisy()]);
        (mfu.from_zero, mfu.cuts_peaks, mfu.unit) = (true, true, Unit::Percent);
        let mut html = String::from("<section><h2>Training</h2><div class=\"cards\">");
        html += &loss.card(true, 0);
        for (index, chart) in [rate, norm, speed, mfu].into_iter().enumerate() {
            if chart.lines.iter().any(|line| line.points.iter().any(|point| point.1.is_finite())) {
                html += &chart.card(false, index + 1);
            }
        }
        html + "</div></section>"
    }

    fn experts(&self) -> String {
        let loads = self.data.layer_loads();
        let maps = HeatMaps::new(&loads);
        let mut note =
            "Share of the tokens that each expert got, over time. Steps run to the right, experts downwards."
                .to_owned();
        if maps.experts_per_row > 1 {
            let _ = write!(note, " Each row is the mean of {} neighbouring experts.", maps.experts_per_row);
        }
        if loads.len() > MAX_MAPS {
            let _ = write!(note, " {} of {} layers are shown.", maps.len(), loads.len());
        }
        format!(
            "<section><h2>Experts</h2><div class=\"cards\"><figure class=\"card wide\"><figcaption><h3>Expert load</h3>\
             <p>{note}</p></figcaption>{}</figure>{}{}</div></section>",
            maps.html(),
            self.balance_charts(),
            layer_table(&loads)
        )
    }

    fn balance_charts(&self) -> String {
        let mut html = String::new();
        let ln_experts = self.data.last.layers.first().map_or(0.0, |layer| (layer.tokens_per_expert.len() as f64).ln());
        for (index, figure) in LAYER_FIGURES.iter().enumerate() {
            let LayerFigure { title, key, unit, note, .. } = *figure;
            let mut chart = self.chart(title, self.layer_lines(figure));
            let finite = || chart.lines.iter().flat_map(|line| &line.points).map(|p| p.1).filter(|v| v.is_finite());
            if (figure.is_occasional && finite().next().is_none())
                || (key == "reroute_rate" && finite().all(|rate| rate == 0.0))
            {
                continue;
            }
            chart.note = note.replace("{ln E}", &short(ln_experts, Unit::Plain));
            (chart.unit, chart.from_zero) =
                (unit, !matches!(key, "expert_diversity" | "mean_prob_entropy" | "max_over_mean"));
            chart.cuts_peaks = matches!(key, "cv" | "max_over_mean");
            html += &chart.card(false, 10 + index);
        }
        let last = &self.data.last;
        let line = |name: &str, key: &str, colour: &str, value: f64| {
            Line::new(name, colour, self.data.series(key), value).noisy()
        };
        let lines = vec![
            line("balance", "train/balance_loss", ORANGE, last.balance_loss),
            line("router z", "train/z_loss", VIOLET, last.z_loss),
        ];
        let others = last.router_losses.named().into_iter().enumerate();
        let others = others.filter_map(|(index, (name, value))| {
            let colour = format!("hsl({} 55% var(--tone))", 150 + 30 * index);
            Some(line(&name.replace('_', " "), &router_loss_name(name), &colour, value?))
        });
        let lines = lines.into_iter().chain(others).collect();
        let mut losses = self.chart("Auxiliary losses", lines);
        losses.note = "Before their coefficients.".to_owned();
        losses.cuts_peaks = true;
        losses.from_zero = true;
        html + &losses.card(false, 30)
    }

    /// Returns a line for each layer, or for many layers their mean in a band from the lowest to the highest.
    fn layer_lines(&self, figure: &LayerFigure) -> Vec<Line> {
        let layers = &self.data.last.layers;
        let series: Vec<Vec<Point>> =
            layers.iter().map(|layer| self.data.series(&format!("moe/layer_{}/{}", layer.layer, figure.key))).collect();
        if layers.len() <= MAX_LINES {
            let hue = |index: usize| 190.0 + 150.0 * index as f64 / (layers.len().max(2) - 1) as f64;
            let line = |(index, points): (usize, Vec<Point>)| {
                let colour = format!("hsl({:.0} 65% var(--tone))", hue(index));
                figure.line(format!("layer {}", layers[index].layer), colour, points)
            };
            return series.into_iter().enumerate().map(line).collect();
        }
        let over_layers = |fold: fn(&mut dyn Iterator<Item = f64>) -> f64| -> Vec<Point> {
            let at = |(index, &(step, _)): (usize, &Point)| {
                (step, fold(&mut series.iter().map(|points| points[index].1).filter(|value| value.is_finite())))
            };
            series[0].iter().enumerate().map(at).collect()
        };
        let lowest = over_layers(|values| values.reduce(f64::min).unwrap_or(f64::NAN));
        let highest = over_layers(|values| values.reduce(f64::max).unwrap_or(f64::NAN));
        let mean = over_layers(|values| {
            let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
            sum / count
        });
        let mut line = figure.line("mean of layers", BLUE, mean);
        // The layer at risk has the lowest diversity or agreement, or the highest value of every other figure.
        let (name, worst) = if matches!(figure.key, "expert_diversity" | "checkpoint_agreement") {
            ("lowest layer", &lowest)
        } else {
            ("highest layer", &highest)
        };
        let worst = figure.line(name, ORANGE, worst.clone());
        line.band = Some((lowest, highest));
        vec![line, worst]
    }

    fn sampled_texts(&self) -> String {
        let samples = self.samples;
        if samples.is_empty() {
            return String::new();
        }
        let mut html = String::from("<section><h2>Samples</h2><div class=\"samples\">");
        let newest = samples.len().saturating_sub(MAX_SAMPLES - 1).max(1);
        for sample in samples.iter().take(1).chain(samples.iter().skip(newest)) {
            let text: String = sample.text.chars().take(MAX_SAMPLE_CHARS).collect();
            let prompt: String = sample.prompt.chars().take(MAX_SAMPLE_CHARS).collect();
            let (step, prompt, text) = (grouped(sample.step), escape(&prompt), escape(&text));
            let _ = write!(html, "<article><h3>Step {step}</h3><p dir=\"auto\"><b>{prompt}</b>{text}</p></article>");
        }
        html + "</div></section>"
    }

    fn settings_table(&self) -> String {
        if self.settings.is_empty() {
            return String::new();
        }
        let mut html = String::from("<section><h2>Settings</h2><div class=\"settings\">");
        for (section, entries) in self.settings {
            let section = if section.is_empty() { "run" } else { section };
            let _ = write!(html, "<table><tr><th colspan=\"2\">{}</th></tr>", escape(section));
            for (key, value) in entries {
                let _ = write!(html, "<tr><th>{}</th><td>{}</td></tr>", escape(key), escape(value));
            }
            html += "</table>";
        }
        html + "</div></section>"
    }
}

fn layer_table(loads: &[LayerLoad]) -> String {
    let from = loads.first().map_or(0, |load| load.recent_from);
    let mut html = format!(
        "<div class=\"card wide\"><h3>Layer by layer</h3><p>Sums from step {} to the end. The bars are the experts, \
         busiest first; the line is the even share.</p><div class=\"scroll\"><table><thead><tr><th>Layer</th><th>Load</th>\
         <th>Most used</th><th>Least used</th><th>CV</th><th>Diversity</th><th>Dead</th><th>Dropped</th></tr></thead><tbody>",
        grouped(from)
    );
    for load in loads.iter().take(MAX_TABLE_ROWS) {
        let recent = &load.recent;
        let even = recent.num_choices() as f64 / recent.tokens_per_expert.len() as f64;
        let mut order: Vec<usize> = (0..recent.tokens_per_expert.len()).collect();
        order.sort_by_key(|&expert| std::cmp::Reverse(recent.tokens_per_expert[expert]));
        let expert = |index: Option<&usize>| {
            index.map_or_else(String::new, |&expert| {
                let times = recent.tokens_per_expert[expert] as f64 / even;
                format!("expert {expert} <small>{times:.2}×</small>")
            })
        };
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            load.layer,
            bars(recent, &order),
            expert(order.first()),
            expert(order.last()),
            short(recent.cv(), Unit::Plain),
            short(recent.expert_diversity(), Unit::Percent),
            short(recent.dead_expert_frac(), Unit::Percent),
            short(recent.drop_rate(), Unit::Percent),
        );
    }
    html += "</tbody></table></div>";
    if loads.len() > MAX_TABLE_ROWS {
        let _ = write!(html, "<p>The first {MAX_TABLE_ROWS} of {} layers.</p>", loads.len());
    }
    html + "</div>"
}

/// Draws the load of the experts as small bars in one path; of many experts every n-th.
fn bars(recent: &LayerRecord, order: &[usize]) -> String {
    let (width, height) = (120.0, 24.0);
    let shown = order.len().min(40);
    let largest = order.first().map_or(1, |&expert| recent.tokens_per_expert[expert]).max(1) as f64;
    let pitch = width / shown as f64;
    let mut d = String::new();
    for bar in 0..shown {
        let expert = order[if shown > 1 { bar * (order.len() - 1) / (shown - 1) } else { 0 }];
        let tall = recent.tokens_per_expert[expert] as f64 / largest * height;
        let _ = write!(d, "M{:.1} {height}v-{tall:.1}h{:.1}v{tall:.1}z", bar as f64 * pitch, pitch * 0.75);
    }
    let even = height - recent.num_choices() as f64 / order.len() as f64 / largest * height;
    format!(
        "<svg class=\"bars\" viewBox=\"0 0 {width} {height}\" aria-hidden=\"true\"><path d=\"{d}\"/>\
         <path class=\"even\" d=\"M0 {even:.1}H{width}\"/></svg>"
    )
}

fn median(points: &[Point]) -> f64 {
    let mut values: Vec<f64> = points.iter().map(|point| point.1).filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn mean_of(layers: &[LayerRecord], figure: fn(&LayerRecord) -> f64) -> f64 {
    layers.iter().map(figure).sum::<f64>() / layers.len() as f64
}
