//! Plans of serving.

use moeworks_plan::{Cluster, Fabric, Model, ModelParts, Precision, ServingJob, ServingPlan, Skew, serving_plan};

fn job(name: &str) -> ServingJob {
    ServingJob {
        parts: ModelParts::from(&Model::named(name).expect("a bundled model")),
        weight_bytes: 1.0,
        cache_bytes: 2.0,
        input_len: 4096,
        output_len: 1024,
        max_token_s: None,
        skew: Skew::Even,
    }
}

fn fabric(num_ranks: usize) -> Fabric {
    Fabric::new(&Cluster::named("h800").expect("a bundled cluster"), num_ranks, Precision::Fp8)
}

fn best(job: &ServingJob, fabric: &Fabric) -> ServingPlan {
    serving_plan(job, fabric)[0]
}

#[test]
fn replicas_use_the_ranks_and_fit_in_their_memory() {
    for num_ranks in [16, 97, 128, 200] {
        let fabric = fabric(num_ranks);
        for plan in serving_plan(&job("deepseek-v3"), &fabric) {
            let used = plan.prefill_replicas * plan.prefill.ranks + plan.decode_replicas * plan.decode.ranks;
            assert_eq!(used + plan.idle_ranks, num_ranks, "{plan:?}");
            let held = plan.decode.weight_bytes + plan.decode.cache_bytes;
            assert!(held <= fabric.rates.memory_bytes && plan.decode.batch >= 1, "{plan:?}");
            assert!((plan.tokens_per_s / plan.requests_per_s - 1024.0).abs() < 1e-6);
        }
    }
}

#[test]
fn a_limit_on_the_time_between_tokens_is_kept_and_costs_throughput() {
    let (job, fabric) = (job("deepseek-v3"), fabric(128));
    let free = best(&job, &fabric);
    let limited = ServingJob { max_token_s: Some(0.5 * free.token_s), ..job.clone() };
    let plans = serving_plan(&limited, &fabric);
    assert!(!plans.is_empty());
    for plan in plans {
        assert!(plan.token_s <= 0.5 * free.token_s && plan.requests_per_s <= free.requests_per_s, "{plan:?}");
    }
    assert!(serving_plan(&ServingJob { max_token_s: Some(1e-9), ..job }, &fabric).is_empty());
}

/// Replicas that do prompts as well stop answering meanwhile: under a limit on the time between tokens they take
/// fewer sequences, in the place of none.
#[test]
fn replicas_that_do_prompts_too_keep_a_limit_with_fewer_sequences() {
    let (job, fabric) = (job("deepseek-v3"), fabric(128));
    let together = |job: &ServingJob| {
        serving_plan(job, &fabric).into_iter().find(|plan| plan.prefill_replicas == 0).expect("a plan")
    };
    let free = together(&job);
    for share in [0.9, 0.6] {
        let limit = share * free.token_s;
        let plan = together(&ServingJob { max_token_s: Some(limit), ..job.clone() });
        assert!(plan.token_s <= limit && plan.token_s > 0.8 * limit, "{} of {limit}", plan.token_s);
        assert!(plan.requests_per_s < free.requests_per_s);
    }
}

#[test]
fn faster_memory_and_links_never_serve_fewer_requests_and_skew_never_more() {
    let (job, fabric) = (job("deepseek-v3"), fabric(64));
    let before = best(&job, &fabric).requests_per_s;
    let mut better = fabric.clone();
    better.rates.memory_bytes_per_s *= 2.0;
    assert!(best(&job, &better).requests_per_s >= before);
    let mut better = fabric.clone();
    better.levels.iter_mut().for_each(|level| level.bytes_per_s *= 2.0);
    assert!(best(&job, &better).requests_per_s >= before);
    let skewed = ServingJob { skew: Skew::Zipf(1.0), ..job };
    assert!(best(&skewed, &fabric).requests_per_s <= before);
}

/// Latent attention keeps 576 numbers of a token and layer: 70 KB a token in bf16 over 61 layers.
#[test]
fn keys_and_values_take_what_the_model_keeps() {
    let plan = best(&job("deepseek-v3"), &fabric(128));
    let sequences = plan.decode.batch / (plan.decode.ranks / plan.decode.tp);
    let each = plan.decode.cache_bytes / sequences as f64 / 5120.0;
    assert!((each - 2.0 * 576.0 * 61.0).abs() < 1.0, "{each} bytes a token");
}

#[test]
fn a_model_larger_than_the_cluster_is_served_nowhere() {
    assert!(serving_plan(&job("switch-c"), &fabric(8)).is_empty());
}
