//! What the schemes of routing were published with: choosing one by `model.router.kind` also sets these, unless they are
//! given beside it.

use toml::Value;

/// The settings that go with a scheme, as in TOML.
pub(super) fn companions(kind: &str) -> Vec<(&'static str, Value)> {
    let settings: &[(&'static str, &str)] = match kind {
        // 2101.03961: the probability is the weight, capacity 1.25 and jitter 0.01.
        "switch" => &[
            ("model.top_k", "1"),
            ("model.normalize_weights", "false"),
            ("model.capacity_factor", "1.25"),
            ("model.jitter", "0.01"),
        ],
        // 1701.06538, section 4 and appendix A.
        "noisy_top_k" => &[
            ("model.normalize_weights", "true"),
            ("train.balance", "'none'"),
            ("train.importance_coef", "0.1"),
            ("train.load_coef", "0.1"),
        ],
        // 2006.16668: room for twice the tokens over the experts.
        "gshard" => &[("model.top_k", "2"), ("model.normalize_weights", "true"), ("model.capacity_factor", "1.0")],
        // The z-loss of noisy logits over a low temperature would outweigh all else.
        "gumbel" => &[("model.router.temperature", "'linear 0.5 to 0.1'"), ("train.z_coef", "0.0")],
        "expert_choice" => &[("model.normalize_weights", "false"), ("train.balance", "'none'")],
        "base" => &[("model.top_k", "1"), ("train.balance", "'none'")],
        "sinkhorn" => &[("model.normalize_weights", "false"), ("train.balance", "'none'")],
        "hash" => &[("model.top_k", "1"), ("train.balance", "'none'"), ("train.z_coef", "0.0")],
        // 2403.07652.
        "top_p" => &[("model.normalize_weights", "false"), ("train.local_entropy_coef", "1e-4")],
        "relu" => &[("train.balance", "'none'"), ("train.z_coef", "0.0")],
        _ => &[],
    };
    let value = |text: &str| text.parse().expect("the table's values are TOML");
    settings.iter().map(|(setting, text)| (*setting, value(text))).collect()
}
