//! The results of a study as a Markdown page.

use std::fmt::Write as _;

use super::{Balance, Finding, Study, flops_unit};
use crate::report::{Unit, grouped, short};

/// Renders the page: what was trained, the plot (a separate file) and the table. `command` is the command that made
/// it.
#[must_use]
pub fn report(study: &Study, findings: &[Finding], plot_file: &str, command: &str) -> String {
    let (model, train) = (&study.base.model, &study.base.train);
    let flops = findings.iter().map(|finding| finding.flops).fold(0.0, f64::max);
    let (size, unit) = flops_unit(flops);
    let mut page = format!(
        "# Routing schemes compared\n\nMade by\n\n```sh\n{command}\n```\n\nEvery model has {} layers of width {} and was \
         trained on the same text in the same order for {} {unit} (the base: {} steps of {} tokens), with AdamW at {} and \
         the balance loss times {} unless its line says otherwise. The dense model is as wide as the experts that a token \
         passes. Validation loss is in nats a token on the same {} tokens for all{}. Balance and drops are means over the \
         layers and the last tenth of the steps. Where a scheme decides how many experts a token has, its operations are \
         counted as if it had the base's number. Seconds are processor time of the training steps, all threads together, on \
         the machine that made this page.\n\n![validation loss]({plot_file})\n\n",
        model.num_layers,
        model.width,
        short(flops / size, Unit::Plain),
        grouped(train.steps),
        grouped(train.step_tokens() as u64),
        train.lr,
        train.balance_coef,
        if train.eval_batches == 0 {
            "held-out".to_owned()
        } else {
            grouped((train.eval_batches * train.microbatch_tokens()) as u64)
        },
        if study.num_seeds > 1 {
            let pairs = "; so is what it is against the dense model of the same seed";
            format!("; it is the mean of {} seeds, with half their range{pairs}", study.num_seeds)
        } else {
            String::new()
        },
    );
    page += "| scheme | validation loss | against dense | experts a token | CV | max / mean | dropped | rerouted | specialisation | seconds | \
             steps | parameters, active |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    let dense = findings.iter().find(|finding| finding.balance.is_none());
    let mut order: Vec<&Finding> = findings.iter().collect();
    order.sort_by(|a, b| a.val_loss().total_cmp(&b.val_loss()));
    for finding in order {
        page += &line(finding, dense);
    }
    page += "\n";
    for finding in findings {
        let _ = writeln!(page, "- `{}`: {}", finding.variant.name, finding.variant.what);
    }
    page
}

fn line(finding: &Finding, dense: Option<&Finding>) -> String {
    let spread = |half: f64| if finding.val_losses.len() > 1 { format!(" ± {half:.4}") } else { String::new() };
    let loss = format!("{:.4}{}", finding.val_loss(), spread(finding.spread()));
    let against = dense.filter(|_| finding.balance.is_some()).map_or_else(String::new, |dense| {
        let (mean, half) = finding.above(dense);
        format!("{mean:+.4}{}", spread(half))
    });
    let balance = finding.balance.map_or_else(
        || " | | | | | ".to_owned(),
        |Balance { experts_per_token, cv, max_over_mean, drop_rate, reroute_rate, specialization }| {
            let share = |share| short(share, Unit::Percent);
            let (dropped, rerouted, special) = (share(drop_rate), share(reroute_rate), share(specialization));
            let experts = short(experts_per_token, Unit::Plain);
            format!("{experts} | {cv:.3} | {max_over_mean:.2} | {dropped} | {rerouted} | {special}")
        },
    );
    format!(
        "| {} | {loss} | {against} | {balance} | {} | {} | {}, {} |\n",
        finding.variant.name,
        short(finding.seconds, Unit::Plain),
        grouped(finding.variant.config.train.steps),
        short(finding.parameters.0 as f64, Unit::Plain),
        short(finding.parameters.1 as f64, Unit::Plain),
    )
}
