//! The picture of a timeline: a row a rank, time from left to right.
//!
//! F, B and W differ in colour and in texture (plain, hatched, dotted). A rank with several stages has each in a
//! shade of its own. A whole backward is a B with a W along its bottom; an overlapped pair has its F above its
//! backward. What travels is drawn in a strip under the row.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::action::{Action, Chain, Entry, Kind};
use super::check::{message_peer, releases};
use super::makespan::{Span, Timeline};

/// The look of a picture.
#[derive(Clone, Copy, Debug)]
pub struct SvgOptions<'a> {
    /// The unit of the times, as the axis names it: `ms`, `s`.
    pub unit: &'a str,
    /// The width in pixels.
    pub width: f64,
}

impl Default for SvgOptions<'_> {
    fn default() -> Self {
        Self { unit: "time units", width: 1120.0 }
    }
}

/// Ranks that are drawn at most.
const MAX_ROWS: usize = 256;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 62.0;
const BOX: f64 = 28.0;
const STRIP: f64 = 10.0;
const GAP: f64 = 7.0;
/// The part of a whole backward's box that is drawn as a W.
const WEIGHT_PART: f64 = 0.3;

/// Fills of F, B and W in four shades.
const COLOURS: [(char, [&str; 4]); 3] = [
    ('F', ["#cfe3fb", "#a3c9f5", "#79b0ee", "#5697e2"]),
    ('B', ["#fde0bd", "#fbc78a", "#f4ac5a", "#e89435"]),
    ('W', ["#d6eed3", "#aedcaa", "#84c87e", "#60b35a"]),
];

const STYLE: &str = "text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1c1e21}\
.head{font-size:15px;font-weight:600}.soft{fill:#5f656d}.axis{font-size:12px}\
.n{fill:#14181d;text-anchor:middle}.half{font-size:10px}.tiny{font-size:9px}.box{stroke:#fff;stroke-width:.8}.grid{stroke:#dcdcd7}.paper{fill:#fff}.idle{fill:#f1f1ee}\
.D{fill:#7b5fc4}.C{fill:#c0a9ee}.M{fill:#8a9099}\
@media(prefers-color-scheme:dark){text{fill:#e9eaec}.n{fill:#14181d}.soft{fill:#a2a8b0}.grid{stroke:#343942}\
.paper{fill:#14171b}.idle{fill:#1e2228}.box{stroke:#14171b}}";

impl Timeline<'_> {
    /// Draws the timeline as an SVG document, which is readable on light and on dark paper and refers to nothing
    /// outside itself.
    ///
    /// Its size is in proportion to the actions; of more than 256 ranks the first ones are drawn.
    #[must_use]
    pub fn to_svg(&self, options: &SvgOptions<'_>) -> String {
        let mut picture = Picture::new(self, options);
        for rank in 0..picture.num_rows {
            picture.draw_row(rank);
        }
        picture.finish(options)
    }
}

struct Picture<'a> {
    timeline: &'a Timeline<'a>,
    num_rows: usize,
    row_height: f64,
    /// Pixels of a unit of time.
    scale: f64,
    /// The boxes of each fill, as one path.
    paths: BTreeMap<String, String>,
    labels: String,
    narrowest: f64,
    has_pairs: bool,
    has_backward: bool,
}

/// A box that an action is drawn in.
#[derive(Clone, Copy)]
struct Area {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

impl<'a> Picture<'a> {
    fn new(timeline: &'a Timeline<'a>, options: &SvgOptions<'_>) -> Self {
        let travels = timeline.times.message > 0.0 || timeline.has_messages || !timeline.schedule.moe_layers.is_empty();
        let has_strip = timeline.communication > 0.0 && travels;
        let end = if timeline.makespan > 0.0 { timeline.makespan } else { 1.0 };
        Self {
            timeline,
            num_rows: timeline.schedule.num_ranks().min(MAX_ROWS),
            row_height: BOX + GAP + if has_strip { STRIP } else { 0.0 },
            scale: (options.width.max(200.0) - LEFT - RIGHT) / end,
            paths: BTreeMap::new(),
            labels: String::new(),
            narrowest: f64::INFINITY,
            has_pairs: false,
            has_backward: false,
        }
    }

    fn area(&self, rank: usize, span: Span) -> Area {
        let y = TOP + rank as f64 * self.row_height;
        Area { x: LEFT + span.start * self.scale, y, width: span.len() * self.scale, height: BOX }
    }

    fn draw_row(&mut self, rank: usize) {
        let timeline = self.timeline;
        let held = timeline.schedule.stages_of(rank);
        for (entry, &span) in timeline.schedule.ranks[rank].iter().zip(&timeline.spans[rank]) {
            let area = self.area(rank, span);
            match *entry {
                Entry::Pair(forward, backward) => {
                    let half = Area { height: BOX / 2.0, ..area };
                    self.has_pairs = true;
                    self.draw_action(forward, half, &held);
                    self.draw_action(backward, Area { y: half.y + half.height, ..half }, &held);
                }
                Entry::One(action) if action.kind.is_compute() => self.draw_action(action, area, &held),
                Entry::One(action) => self.draw_travel(action.kind, rank, span),
            }
            for action in entry.actions() {
                let sends = !timeline.has_messages && releases(timeline.schedule, false, action);
                let send = Action::new(send_kind(action), action.stage, action.microbatch);
                if sends && message_peer(timeline.schedule, send).is_some() {
                    let end = span.end + timeline.times.message;
                    self.draw_travel(send.kind, rank, Span { start: span.end, end });
                }
            }
        }
    }

    fn draw_action(&mut self, action: Action, area: Area, held: &[(usize, u32)]) {
        let shade = self.shade(action, held);
        let letter = match action.kind.chain() {
            Chain::Forward => 'F',
            Chain::Backward => 'B',
            Chain::Weight => 'W',
        };
        if action.kind == Kind::Backward {
            let part = area.height * WEIGHT_PART;
            self.has_backward = true;
            self.add(format!("B{shade}"), Area { height: area.height - part, ..area });
            self.add(format!("W{shade}"), Area { y: area.y + area.height - part, height: part, ..area });
        } else {
            self.add(format!("{letter}{shade}"), area);
        }
        self.narrowest = self.narrowest.min(area.width);
        self.label(action, area);
    }

    /// Returns the shade of a stage among those that a rank holds.
    fn shade(&self, action: Action, held: &[(usize, u32)]) -> usize {
        let copy = self.timeline.schedule.copy_of(action.microbatch).unwrap_or(0);
        let index = held.iter().position(|&stage| stage == (copy, action.stage)).unwrap_or(0);
        match held.len() {
            0 | 1 => 1,
            2 => 2 * index,
            _ => index % 4,
        }
    }

    fn draw_travel(&mut self, kind: Kind, rank: usize, span: Span) {
        let area = self.area(rank, span);
        let strip = Area { y: area.y + BOX + 1.0, height: 5.0, ..area };
        let (fill, strip) = match kind {
            Kind::ReceiveInput | Kind::ReceiveGrad => return,
            Kind::ForwardDispatch | Kind::BackwardDispatch => ("D", strip),
            Kind::ForwardCombine | Kind::BackwardCombine => ("C", strip),
            _ => ("M", Area { y: strip.y + 6.0, height: 3.0, ..strip }),
        };
        if strip.width > 0.0 {
            self.add(fill.to_owned(), strip);
        }
    }

    fn add(&mut self, fill: String, area: Area) {
        let Area { x, y, width, height } = area;
        let path = self.paths.entry(fill).or_default();
        let _ = write!(path, "M{} {}h{}v{}h-{}z", short(x), short(y), short(width), short(height), short(width));
    }

    /// Writes the letters and the number of the microbatch into a box, or the number alone, in the largest way that
    /// fits.
    fn label(&mut self, action: Action, area: Area) {
        let (class, size) = if area.height < BOX { ("n half", 10.0) } else { ("n", 11.0) };
        let number = action.microbatch.to_string();
        let full = format!("{}{number}", action.kind.letters());
        let ways = [(&full, class, size), (&number, class, size), (&number, "n tiny", 9.0)];
        let fits = |&(text, _, size): &(&String, &str, f64)| text_width(text, size) + 2.0 <= area.width;
        let Some((text, class, size)) = ways.into_iter().find(fits) else { return };
        let middle = if action.kind == Kind::Backward { (1.0 - WEIGHT_PART) / 2.0 } else { 0.5 };
        let (x, y) = (short(area.x + area.width / 2.0), short(area.y + area.height * middle + 0.36 * size));
        let _ = write!(self.labels, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>");
    }

    fn finish(&self, options: &SvgOptions<'_>) -> String {
        let schedule = self.timeline.schedule;
        let more = schedule.num_ranks() - self.num_rows;
        let bottom = TOP + self.num_rows as f64 * self.row_height;
        let height = bottom + 46.0 + if more > 0 { 18.0 } else { 0.0 };
        let width = options.width.max(200.0);
        let name = escape(&schedule.name);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"timeline of {name}\">\
             <style>{STYLE}</style>",
            short(width),
            short(height)
        );
        self.write_fills(&mut svg);
        let _ = write!(svg, "<rect class=\"paper\" width=\"{}\" height=\"{}\"/>", short(width), short(height));
        self.write_head(&mut svg, &name);
        self.write_axis(&mut svg, bottom, options);
        let class = if self.narrowest > 4.0 { "box" } else { "" };
        for (fill, path) in &self.paths {
            let _ = match fill.len() {
                2 => write!(svg, "<path class=\"{class}\" style=\"fill:url(#{fill})\" d=\"{path}\"/>"),
                _ => write!(svg, "<path class=\"{fill}\" d=\"{path}\"/>"),
            };
        }
        svg.push_str(&self.labels);
        if more > 0 {
            let _ = write!(
                svg,
                "<text class=\"soft\" x=\"{LEFT}\" y=\"{}\">and {more} more ranks</text>",
                short(height - 8.0)
            );
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Writes the patterns of the fills that are in use, and of those in the legend.
    fn write_fills(&self, svg: &mut String) {
        svg.push_str("<defs>");
        for (letter, shades) in COLOURS {
            for (shade, colour) in shades.iter().enumerate() {
                if shade != 1 && !self.paths.contains_key(&format!("{letter}{shade}")) {
                    continue;
                }
                let texture = match letter {
                    'B' => "<path d=\"M-1 1l2 -2M0 6l6 -6M5 7l2 -2\" stroke=\"#7a3d00\" stroke-opacity=\".28\"/>",
                    'W' => {
                        "<circle cx=\"1.5\" cy=\"1.5\" r=\".9\" fill=\"#0c4a12\" fill-opacity=\".5\"/>\
                            <circle cx=\"4.5\" cy=\"4.5\" r=\".9\" fill=\"#0c4a12\" fill-opacity=\".5\"/>"
                    }
                    _ => "",
                };
                let _ = write!(
                    svg,
                    "<pattern id=\"{letter}{shade}\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">\
                     <rect width=\"6\" height=\"6\" fill=\"{colour}\"/>{texture}</pattern>"
                );
            }
        }
        svg.push_str("</defs>");
    }

    fn write_head(&self, svg: &mut String, name: &str) {
        let timeline = self.timeline;
        let (ranks, microbatches) = (timeline.schedule.num_ranks(), timeline.schedule.num_microbatches());
        let hidden = timeline
            .hidden()
            .map_or_else(String::new, |hidden| format!(", {:.0}% of communication hidden", 100.0 * hidden));
        let _ = write!(
            svg,
            "<text class=\"head\" x=\"12\" y=\"22\">{name}</text><text class=\"soft axis\" x=\"{}\" y=\"22\">{ranks} ranks, \
             {microbatches} microbatches: makespan {}, bubble {:.1}%{hidden}</text>",
            short(26.0 + text_width(name, 15.0)),
            number(timeline.makespan),
            100.0 * timeline.bubble(),
        );
        let mut x = 12.0;
        for (fills, text) in self.legend() {
            write_swatch(svg, fills, x);
            let _ = write!(svg, "<text class=\"soft\" x=\"{}\" y=\"45\">{text}</text>", short(x + 23.0));
            x += 40.0 + text_width(text, 11.0);
        }
    }

    fn legend(&self) -> Vec<(&'static [&'static str], &'static str)> {
        let mut actions = self.timeline.schedule.ranks.iter().flatten().flat_map(Entry::actions);
        let has = |fill: &str| self.paths.contains_key(fill);
        let has_split = actions.any(|action| action.kind.chain() == Chain::Weight);
        let entries: [(bool, &'static [&'static str], &'static str); 9] = [
            (true, &["F1"], "F forward"),
            (has_split, &["B1"], "B gradient of the input"),
            (has_split, &["W1"], "W gradient of the weights"),
            (self.has_backward, &["B1", "W1"], "BW both gradients"),
            (self.has_pairs, &["F1", "B1"], "overlapped pair"),
            (has("F2"), &["F0", "F2"], "stages of a rank"),
            (has("D"), &["D"], "dispatch"),
            (has("C"), &["C"], "combine"),
            (has("M"), &["M"], "message"),
        ];
        entries.into_iter().filter(|&(is_there, ..)| is_there).map(|(_, fills, text)| (fills, text)).collect()
    }

    fn write_axis(&self, svg: &mut String, bottom: f64, options: &SvgOptions<'_>) {
        let width = self.timeline.makespan * self.scale;
        for rank in 0..self.num_rows {
            let y = TOP + rank as f64 * self.row_height;
            let _ = write!(
                svg,
                "<text class=\"soft axis\" x=\"{}\" y=\"{}\" text-anchor=\"end\">rank {rank}</text>\
                 <rect class=\"idle\" x=\"{LEFT}\" y=\"{}\" width=\"{}\" height=\"{BOX}\"/>",
                LEFT - 8.0,
                short(y + BOX / 2.0 + 4.0),
                short(y),
                short(width)
            );
        }
        let step = nice_step(self.timeline.makespan);
        let num_ticks = if step > 0.0 { (self.timeline.makespan / step + 1e-9) as usize } else { 0 };
        for tick in 0..=num_ticks {
            let time = tick as f64 * step;
            let x = short(LEFT + time * self.scale);
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{x} {}V{}\"/><text class=\"soft axis\" x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                short(TOP - 4.0),
                short(bottom),
                short(bottom + 15.0),
                number(time)
            );
        }
        let x = short(LEFT + width);
        let unit = escape(options.unit);
        let _ = write!(
            svg,
            "<text class=\"soft axis\" x=\"{x}\" y=\"{}\" text-anchor=\"end\">{unit}</text>",
            short(bottom + 32.0)
        );
    }
}

/// Writes the swatch of a legend: two stages side by side, two actions one above the other.
fn write_swatch(svg: &mut String, fills: &[&str], x: f64) {
    let is_beside = fills == ["F0", "F2"];
    let part = 1.0 / fills.len() as f64;
    let (width, height) = if is_beside { (18.0 * part, 14.0) } else { (18.0, 14.0 * part) };
    for (i, fill) in fills.iter().enumerate() {
        let i = i as f64;
        let (x, y) = if is_beside { (x + i * width, 34.0) } else { (x, 34.0 + i * height) };
        let style = if fill.len() == 2 { format!("style=\"fill:url(#{fill})\"") } else { format!("class=\"{fill}\"") };
        let (x, y, width, height) = (short(x), short(y), short(width), short(height));
        let _ = write!(svg, "<rect {style} x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>");
    }
}

/// Returns about how wide a text is at a size of letters.
fn text_width(text: &str, size: f64) -> f64 {
    let of = |c: char| match c {
        'W' | 'm' | 'w' => 0.95,
        'i' | 'l' | 'f' | 't' | ' ' => 0.36,
        'A'..='Z' => 0.68,
        _ => 0.6,
    };
    text.chars().map(of).sum::<f64>() * size
}

fn send_kind(action: Action) -> Kind {
    if action.kind.chain() == Chain::Forward { Kind::SendOutput } else { Kind::SendGrad }
}

/// Returns a step of 1, 2 or 5 times a power of ten that gives some ten ticks.
fn nice_step(length: f64) -> f64 {
    if length <= 0.0 {
        return 0.0;
    }
    let power = 10_f64.powf((length / 10.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power * 12.0 >= length);
    step.unwrap_or(10.0) * power
}

/// Writes a coordinate with at most two decimals.
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Writes a time with six significant digits at most.
fn number(value: f64) -> String {
    let decimals = if value == 0.0 { 0 } else { (5.0 - value.abs().log10().floor()).clamp(0.0, 12.0) as usize };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn escape(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;");
    escaped.chars().filter(|c| !c.is_control()).collect()
}
