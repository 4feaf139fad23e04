//! The results of a study as one SVG: the validation loss during training and at the end.

use std::fmt::Write as _;

use super::{Finding, flops_unit};
use crate::report::{Unit, escape, tick_labels, ticks};

const WIDTH: f64 = 960.0;
/// The left, top, right and bottom edges of the upper part, which has the curves.
const CURVES: (f64, f64, f64, f64) = (64.0, 34.0, 940.0, 330.0);
/// The top of the lower part, which has a row for each variant.
const ROWS_TOP: f64 = 420.0;
const ROW: f64 = 24.0;
const NAMES: f64 = 150.0;

/// Draws the plot as an SVG file that follows the reader's light or dark setting.
#[must_use]
pub fn plot(findings: &[Finding]) -> String {
    let mut order: Vec<&Finding> = findings.iter().filter(|finding| finding.val_loss().is_finite()).collect();
    order.sort_by(|a, b| a.val_loss().total_cmp(&b.val_loss()));
    let height = ROWS_TOP + ROW * order.len() as f64 + 46.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"validation loss of routing schemes\"><style>\
         text{{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1c1e21}}.soft{{fill:#5f656d}}\
         .grid{{stroke:#e6e6e2}}.line{{fill:none;stroke-width:1.8}}.dense{{stroke:#1c1e21;stroke-width:2.4}}.paper{{fill:#fff}}\
         .ink{{fill:#1c1e21}}@media(prefers-color-scheme:dark){{text,.ink{{fill:#e9eaec}}.soft{{fill:#a2a8b0}}\
         .grid{{stroke:#343942}}.dense{{stroke:#e9eaec}}.paper{{fill:#14171b}}}}</style>\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>"
    );
    if order.is_empty() {
        svg.push_str("<text x=\"64\" y=\"20\">No validation loss is a number</text>");
    } else {
        curves(&mut svg, &order);
        ends(&mut svg, &order);
    }
    svg + "</svg>\n"
}

/// Returns the hue of the variant at `index`; the dense model is drawn in the text colour instead.
fn hue(index: usize, count: usize) -> f64 {
    200.0 + 330.0 * index as f64 / count.max(1) as f64
}

fn colour(index: usize, count: usize) -> String {
    format!("hsl({:.0} 62% 48%)", hue(index, count) % 360.0)
}

fn is_dense(finding: &Finding) -> bool {
    finding.balance.is_none()
}

fn curves(svg: &mut String, order: &[&Finding]) {
    let (left, top, right, bottom) = CURVES;
    let points = || order.iter().flat_map(|finding| &finding.curve).filter(|point| point.1.is_finite());
    let most = points().fold(0.0, |most: f64, point| most.max(point.0));
    let low = points().fold(f64::INFINITY, |low, point| low.min(point.1));
    // The first evaluation is far above the rest; the axis ends at the 90th percentile.
    let mut losses: Vec<f64> = points().map(|point| point.1).collect();
    losses.sort_by(f64::total_cmp);
    let high = losses.get(losses.len() * 9 / 10).copied().unwrap_or(1.0).max(low + 1e-3);
    let (low, high) = (low - 0.05 * (high - low), high + 0.05 * (high - low));
    let x = |flops: f64| left + flops / most.max(1.0) * (right - left);
    let y = |loss: f64| bottom - (loss - low) / (high - low) * (bottom - top);
    let _ = write!(svg, "<text x=\"{left}\" y=\"20\">Validation loss (nats a token) while training</text>");
    let losses = ticks(low, high, 6);
    for (&tick, label) in losses.iter().zip(tick_labels(&losses, Unit::Plain)) {
        let at = y(tick);
        let _ = write!(svg, "<path class=\"grid\" d=\"M{left} {at:.1}H{right}\"/>");
        let _ = write!(
            svg,
            "<text class=\"soft\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            left - 8.0,
            at + 4.0
        );
    }
    let (size, unit) = flops_unit(most);
    let scaled = ticks(0.0, most / size, 6);
    for (&tick, label) in scaled.iter().zip(tick_labels(&scaled, Unit::Plain)) {
        let at = x(tick * size);
        if at < right - 70.0 {
            let _ = write!(
                svg,
                "<text class=\"soft\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                bottom + 18.0
            );
        }
    }
    let _ = write!(svg, "<text class=\"soft\" x=\"{right}\" y=\"{}\" text-anchor=\"end\">{unit}</text>", bottom + 18.0);
    let _ = write!(
        svg,
        "<clipPath id=\"c\"><rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\"/></clipPath>",
        right - left,
        bottom - top
    );
    svg.push_str("<g clip-path=\"url(#c)\">");
    for (index, finding) in order.iter().enumerate() {
        let mut path = String::new();
        for &(flops, loss) in finding.curve.iter().filter(|point| point.1.is_finite()) {
            let _ = write!(path, "{}{:.1} {:.1}", if path.is_empty() { "M" } else { "L" }, x(flops), y(loss));
        }
        let (class, style) = if is_dense(finding) {
            ("line dense", String::new())
        } else {
            ("line", format!(" style=\"stroke:{}\"", colour(index, order.len())))
        };
        let name = escape(finding.variant.name);
        let _ = write!(svg, "<path class=\"{class}\"{style} d=\"{path}\"><title>{name}</title></path>");
    }
    svg.push_str("</g>");
}

/// Draws a row for each variant, best first, and a line at the dense model's loss.
fn ends(svg: &mut String, order: &[&Finding]) {
    let (left, right) = (NAMES, CURVES.2 - 70.0);
    let edge = |finding: &Finding| (finding.val_loss() - finding.spread(), finding.val_loss() + finding.spread());
    let low = order.iter().map(|finding| edge(finding).0).fold(f64::INFINITY, f64::min);
    let high = order.iter().map(|finding| edge(finding).1).fold(f64::NEG_INFINITY, f64::max).max(low + 1e-3);
    let (low, high) = (low - 0.06 * (high - low), high + 0.06 * (high - low));
    let x = |loss: f64| left + (loss - low) / (high - low) * (right - left);
    let bottom = ROWS_TOP + ROW * order.len() as f64;
    let _ =
        write!(svg, "<text x=\"{}\" y=\"{}\">Validation loss at the end, best first</text>", CURVES.0, ROWS_TOP - 22.0);
    let losses = ticks(low, high, 6);
    for (&tick, label) in losses.iter().zip(tick_labels(&losses, Unit::Plain)) {
        let at = x(tick);
        let _ = write!(svg, "<path class=\"grid\" d=\"M{at:.1} {}V{bottom}\"/>", ROWS_TOP - 8.0);
        let _ = write!(
            svg,
            "<text class=\"soft\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            bottom + 18.0
        );
    }
    if let Some(dense) = order.iter().find(|finding| is_dense(finding)) {
        let at = x(dense.val_loss());
        let _ =
            write!(svg, "<path class=\"dense\" stroke-dasharray=\"4 4\" d=\"M{at:.1} {}V{bottom}\"/>", ROWS_TOP - 8.0);
    }
    for (index, finding) in order.iter().enumerate() {
        let at = ROWS_TOP + ROW * (index as f64 + 0.5);
        let (from, to) = edge(finding);
        let fill =
            if is_dense(finding) { String::new() } else { format!(" style=\"fill:{}\"", colour(index, order.len())) };
        let name = escape(finding.variant.name);
        let _ = write!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>", left - 10.0, at + 4.0);
        let _ = write!(
            svg,
            "<rect class=\"ink\"{fill} x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"2\"/>",
            x(from),
            at - 1.0,
            x(to) - x(from)
        );
        let _ = write!(svg, "<circle class=\"ink\"{fill} cx=\"{:.1}\" cy=\"{at:.1}\" r=\"5\"/>", x(finding.val_loss()));
        let _ = write!(
            svg,
            "<text class=\"soft\" x=\"{}\" y=\"{:.1}\">{:.4}</text>",
            right + 14.0,
            at + 4.0,
            finding.val_loss()
        );
    }
}
