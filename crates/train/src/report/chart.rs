//! Line charts as SVG, with an HTML legend above.
//!
//! Colours are CSS variables or hues that are visible on light and on dark backgrounds, so that one drawing serves
//! both.

use std::fmt::Write as _;

use super::data::Point;
use super::numbers::{Unit, short, tick_labels, ticks};
use super::page::escape;

/// The number of points from which a noisy line is smoothed.
const MIN_SMOOTHED: usize = 40;

/// One line of a chart, optionally with a band around it.
pub(super) struct Line {
    /// The name in the legend.
    pub(super) name: String,
    /// The CSS colour.
    pub(super) colour: String,
    /// The points in order of steps; NaN breaks the line.
    pub(super) points: Vec<Point>,
    /// The value shown in the legend.
    pub(super) last: f64,
    /// True if the points are noisy: they are drawn faint, with a smoothed line on top.
    pub(super) is_noisy: bool,
    /// True if each point gets a dot.
    pub(super) has_dots: bool,
    /// The lower and upper edge of a band around the line.
    pub(super) band: Option<(Vec<Point>, Vec<Point>)>,
}

impl Line {
    /// Creates a line with a name, a colour, points and the value for the legend.
    pub(super) fn new(name: impl Into<String>, colour: impl Into<String>, points: Vec<Point>, last: f64) -> Self {
        let (name, colour) = (name.into(), colour.into());
        Self { name, colour, points, last, is_noisy: false, has_dots: false, band: None }
    }

    /// Marks the line as noisy.
    pub(super) fn noisy(mut self) -> Self {
        self.is_noisy = self.points.len() >= MIN_SMOOTHED;
        self
    }
}

/// A chart of lines over steps.
pub(super) struct Chart {
    /// The title of the chart.
    pub(super) title: &'static str,
    /// One sentence for a reader who does not know the figure.
    pub(super) note: String,
    /// The lines; the first is drawn first.
    pub(super) lines: Vec<Line>,
    /// The format of the values.
    pub(super) unit: Unit,
    /// True if the axis starts at zero.
    pub(super) from_zero: bool,
    /// True if rare peaks may be cut off so that the rest is legible.
    pub(super) cuts_peaks: bool,
    /// The steps to mark on the axis: skipped updates.
    pub(super) marks: Vec<f64>,
    /// The first and the last step.
    pub(super) steps: (f64, f64),
}

/// The rectangle of the plot, in user units of the SVG.
struct Frame {
    width: f64,
    height: f64,
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
    steps: (f64, f64),
    values: (f64, f64),
}

impl Frame {
    fn x(&self, step: f64) -> f64 {
        let (first, last) = self.steps;
        let share = if last > first { (step - first) / (last - first) } else { 0.5 };
        self.left + share * (self.right - self.left)
    }

    fn y(&self, value: f64) -> f64 {
        let (low, high) = self.values;
        // Values outside are clamped to just outside the plot, where the clip path hides them, so that coordinates
        // stay short.
        let share = ((value - low) / (high - low)).clamp(-0.2, 1.2);
        self.bottom - share * (self.bottom - self.top)
    }
}

impl Chart {
    /// Renders the chart as a card. A wide chart is drawn at two sizes; style rules show the one that is legible.
    pub(super) fn card(&self, is_wide: bool, id: usize) -> String {
        let class = if is_wide { "card wide" } else { "card" };
        let mut html = format!("<figure class=\"{class}\"><figcaption><h3>{}</h3>", escape(self.title));
        if !self.note.is_empty() {
            let _ = write!(html, "<p>{}</p>", escape(&self.note));
        }
        let _ = write!(html, "</figcaption>{}", self.legend());
        if is_wide {
            html += &self.svg(1000.0, 320.0, "for-wide", &format!("w{id}"));
            html += &self.svg(460.0, 270.0, "for-narrow", &format!("c{id}"));
        } else {
            html += &self.svg(460.0, 220.0, "", &format!("c{id}"));
        }
        html + "</figure>"
    }

    fn legend(&self) -> String {
        let mut html = String::from("<ul class=\"legend\">");
        for line in &self.lines {
            let (colour, name, last) = (&line.colour, escape(&line.name), short(line.last, self.unit));
            let _ = write!(html, "<li><i style=\"background:{colour}\"></i>{name} <b>{last}</b></li>");
        }
        if self.cuts_peaks
            && let Some(peak) = self.cut_peak()
        {
            let _ = write!(html, "<li class=\"quiet\">peak <b>{}</b></li>", short(peak, self.unit));
        }
        if !self.marks.is_empty() {
            html += "<li><i class=\"mark\"></i>skipped update</li>";
        }
        html + "</ul>"
    }

    fn finite_values(&self) -> Vec<f64> {
        let of_line = |line: &Line| {
            let band = line.band.iter().flat_map(|(low, high)| low.iter().chain(high));
            line.points.iter().chain(band).map(|point| point.1).filter(|value| value.is_finite()).collect::<Vec<_>>()
        };
        self.lines.iter().flat_map(of_line).collect()
    }

    /// Returns the highest value if it is so far above nearly all others that it is cut off.
    fn cut_peak(&self) -> Option<f64> {
        let mut values = self.finite_values();
        values.sort_by(f64::total_cmp);
        let highest = *values.last()?;
        let usual = values[(values.len() - 1) * 97 / 100];
        (highest > 2.0 * usual && usual > 0.0).then_some(highest)
    }

    /// Returns the lowest and the highest value of the axis.
    fn value_range(&self) -> (f64, f64) {
        let mut values = self.finite_values();
        values.sort_by(f64::total_cmp);
        let (Some(&lowest), Some(&highest)) = (values.first(), values.last()) else { return (0.0, 1.0) };
        let high = if self.cuts_peaks && self.cut_peak().is_some() {
            1.5 * values[(values.len() - 1) * 97 / 100]
        } else {
            highest
        };
        let low = if self.from_zero { lowest.min(0.0) } else { lowest };
        let span = high - low;
        if span <= 1e-12 * high.abs().max(1e-12) {
            // All values are equal: the line is drawn in the middle, or at the bottom for zero.
            let room = if high == 0.0 { 0.01 } else { high.abs() * 0.1 };
            return if high == 0.0 { (0.0, room) } else { (low - room, high + room) };
        }
        (if self.from_zero && lowest >= 0.0 { 0.0 } else { low - 0.04 * span }, high + 0.06 * span)
    }

    fn svg(&self, width: f64, height: f64, class: &str, id: &str) -> String {
        let values = self.value_range();
        let y_ticks = ticks(values.0, values.1, if height > 300.0 { 6 } else { 4 });
        let labels = tick_labels(&y_ticks, self.unit);
        // The left margin holds the longest label, at about eight units per letter.
        let left = labels.iter().map(|label| label.chars().count()).max().unwrap_or(1) as f64 * 8.0 + 10.0;
        let (right, bottom) = (width - 8.0, height - 24.0);
        let frame = Frame { width, height, left, top: 6.0, right, bottom, steps: self.steps, values };
        let mut svg = format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\
             <clipPath id=\"{id}\"><rect x=\"{left}\" y=\"{}\" width=\"{}\" height=\"{}\"/></clipPath>",
            escape(self.title),
            frame.top - 4.0,
            frame.right - left + 6.0,
            frame.bottom - frame.top + 6.0,
        );
        axes(&mut svg, &frame, &y_ticks, &labels);
        let _ = write!(svg, "<g clip-path=\"url(#{id})\">");
        for line in &self.lines {
            draw_line(&mut svg, &frame, line, self.unit);
        }
        for &step in &self.marks {
            let (x, y) = (frame.x(step), frame.bottom);
            let _ = write!(svg, "<path class=\"mark\" d=\"M{x:.1} {:.1}l4 8h-8z\"/>", y - 8.0);
        }
        svg + "</g></svg>"
    }
}

fn axes(svg: &mut String, frame: &Frame, y_ticks: &[f64], labels: &[String]) {
    let (left, right, bottom) = (frame.left, frame.right, frame.bottom);
    for (&tick, label) in y_ticks.iter().zip(labels) {
        let y = frame.y(tick);
        let _ = write!(svg, "<path class=\"grid\" d=\"M{left:.1} {y:.1}H{right:.1}\"/>");
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", left - 7.0, y + 4.0);
    }
    let _ = write!(svg, "<path class=\"axis\" d=\"M{left:.1} {bottom:.1}H{right:.1}\"/>");
    let x_ticks = ticks(frame.steps.0, frame.steps.1, if frame.width > 600.0 { 9 } else { 5 });
    let x_ticks: Vec<f64> = x_ticks.into_iter().filter(|tick| tick.fract() == 0.0).collect();
    let labels = tick_labels(&x_ticks, Unit::Plain);
    for (&tick, label) in x_ticks.iter().zip(&labels) {
        let x = frame.x(tick);
        let _ = write!(svg, "<path class=\"axis\" d=\"M{x:.1} {bottom:.1}v4\"/>");
        // A label that would overlap the word "step" at the right end is left out.
        if x < right - 44.0 {
            let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>", bottom + 17.0);
        }
    }
    let (x, y) = (frame.right, frame.height - 7.0);
    let _ = write!(svg, "<text class=\"quiet\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\">step</text>");
}

fn draw_line(svg: &mut String, frame: &Frame, line: &Line, unit: Unit) {
    let colour = &line.colour;
    if let Some((low, high)) = &line.band {
        let edge =
            |points: &[Point]| -> Vec<Point> { points.iter().copied().filter(|point| point.1.is_finite()).collect() };
        let around: Vec<Point> = edge(low).into_iter().chain(edge(high).into_iter().rev()).collect();
        if around.len() > 2 {
            let _ = write!(svg, "<path d=\"{}Z\" fill=\"{colour}\" fill-opacity=\".16\"/>", path(frame, &around));
        }
    }
    let finite: Vec<&Point> = line.points.iter().filter(|point| point.1.is_finite()).collect();
    if line.is_noisy {
        let _ = write!(svg, "<path class=\"raw\" stroke=\"{colour}\" d=\"{}\"/>", path(frame, &line.points));
        let _ = write!(svg, "<path class=\"line\" stroke=\"{colour}\" d=\"{}\"/>", path(frame, &smooth(&line.points)));
    } else {
        let _ = write!(svg, "<path class=\"line\" stroke=\"{colour}\" d=\"{}\"/>", path(frame, &line.points));
    }
    // A line of one point is invisible without a dot; too many dots would hide the line.
    if finite.len() == 1 || (line.has_dots && finite.len() <= 60) {
        for &&(step, value) in &finite {
            let (x, y, name) = (frame.x(step), frame.y(value), escape(&line.name));
            let _ = write!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{name} {} at step {step}</title></circle>",
                short(value, unit)
            );
        }
    }
}

/// Writes the points as an SVG path with one decimal per coordinate; gaps are moves, not lines.
fn path(frame: &Frame, points: &[Point]) -> String {
    let mut d = String::new();
    let mut is_drawing = false;
    for &(step, value) in points {
        if !value.is_finite() {
            is_drawing = false;
            continue;
        }
        let command = if is_drawing { 'L' } else { 'M' };
        let _ = write!(d, "{command}{:.1} {:.1}", frame.x(step), frame.y(value));
        is_drawing = true;
    }
    d
}

/// Smooths noisy points: a median of neighbours, so that a rare peak leaves no bump, then a weighted mean in which
/// nearer ones weigh more. Uses the points on both sides, so that the line does not lag behind.
fn smooth(points: &[Point]) -> Vec<Point> {
    let reach = (points.len() / 40).max(2);
    let around = |points: &[Point], centre: usize, reach: usize| -> Vec<(usize, f64)> {
        // The window is symmetric also near the ends, so that a slope is not bent there.
        let reach = reach.min(centre).min(points.len() - 1 - centre);
        let near = (centre - reach..=centre + reach).map(|index| (index.abs_diff(centre), points[index].1));
        near.filter(|(_, value)| value.is_finite()).collect()
    };
    let median = |centre: usize| {
        let mut values: Vec<f64> = around(points, centre, reach / 2 + 1).into_iter().map(|(_, value)| value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let medians: Vec<Point> = (0..points.len()).map(|index| (points[index].0, median(index))).collect();
    let mean = |centre: usize| {
        let near = around(&medians, centre, reach);
        let weigh = |offset: usize| (reach + 1 - offset) as f64;
        let weights: f64 = near.iter().map(|&(offset, _)| weigh(offset)).sum();
        near.iter().map(|&(offset, value)| weigh(offset) * value).sum::<f64>() / weights
    };
    (0..points.len()).map(|index| (points[index].0, mean(index))).collect()
}
