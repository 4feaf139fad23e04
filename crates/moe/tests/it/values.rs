//! Routing, dispatch and statistics as plain values.

use moeworks_moe::{
    Dispatch, DispatchRule, LayerStats, NO_EXPERT, Routing, RoutingError, ZeroComputationShare, capacity, cv,
    dead_expert_frac, e_max_violation, expert_diversity, load_entropy, max_over_mean, share,
};
use moeworks_ops::Context;

fn routing(ctx: &Context) -> Routing {
    let ids = [0, 1, 0, 2, 1, 0];
    Routing::new(ctx, 4, 2, &ids, &[0.75, 0.25, 0.5, 0.5, 0.625, 0.375]).unwrap()
}

#[test]
fn a_routing_prints_and_compares() {
    let ctx = Context::cpu(1);
    let routing = routing(&ctx);
    assert_eq!(
        routing.to_string(),
        "0: 0 (0.7500), 1 (0.2500)\n1: 0 (0.5000), 2 (0.5000)\n2: 1 (0.6250), 0 (0.3750)\n"
    );
    assert_eq!(routing, self::routing(&Context::cpu(2)));
    assert_ne!(routing, Routing::new(&ctx, 4, 1, &[0], &[1.0]).unwrap());
    assert!(format!("{routing:?}").contains("[(0, 0.75), (1, 0.25)]"));
    assert_eq!((routing.num_tokens(), routing.top_k(), routing.num_experts()), (3, 2, 4));
}

#[test]
fn a_routing_of_wrong_lists_is_refused() {
    let ctx = Context::cpu(1);
    let length = RoutingError::Length { num_ids: 3, num_weights: 3, top_k: 2 };
    assert_eq!(Routing::new(&ctx, 4, 2, &[0, 1, 2], &[1.0; 3]).unwrap_err(), length);
    assert!(Routing::new(&ctx, 4, 0, &[], &[]).is_err());
    assert!(Routing::new(&ctx, 4, 1, &[0, 1], &[1.0]).is_err());
    let error = Routing::new(&ctx, 4, 2, &[0, 1, 2, 4], &[1.0; 4]).unwrap_err();
    assert_eq!(error, RoutingError::Expert { token: 1, choice: 1, expert: 4, num_experts: 4 });
    assert_eq!(error.to_string(), "choice 1 of token 1 is expert 4: must be below the number of experts, 4");
}

#[test]
fn a_dispatch_serves_first_choices_first_and_drops_later_tokens() {
    let ctx = Context::cpu(1);
    let all = Dispatch::new(&ctx, &routing(&ctx), 0.0);
    assert_eq!(
        all.to_string(),
        "expert 0: 0 (0.7500), 1 (0.5000), 2 (0.3750)\nexpert 1: 2 (0.6250), 0 (0.2500)\nexpert 2: 1 (0.5000)\nexpert 3:\n"
    );
    assert_eq!((all.num_rows(), all.num_dropped(), all.capacity()), (6, 0, 3));
    // ceil(0.5 * 2 * 3 / 4) = 1.
    let tight = Dispatch::new(&ctx, &routing(&ctx), 0.5);
    assert_eq!(
        tight.to_string(),
        "expert 0: 0 (0.7500), 2 dropped\nexpert 1: 2 (0.6250), 1 dropped\nexpert 2: 1 (0.5000)\nexpert 3:\n"
    );
    assert_eq!((tight.num_rows(), tight.num_dropped(), tight.capacity()), (3, 3, 1));
    assert_eq!(tight.rows_per_expert().collect::<Vec<_>>(), [1, 1, 1, 0]);
    assert!(format!("{tight:?}").contains("token_rows: [[Some(0), None], [None, Some(2)], [Some(1), None]]"));
    assert_ne!(all, tight);
    assert_eq!(tight, Dispatch::new(&Context::cpu(3), &routing(&ctx), 0.5));
}

#[test]
fn a_token_may_have_fewer_experts_than_others() {
    let ctx = Context::cpu(2);
    let ids = [2, NO_EXPERT, 0, 1, NO_EXPERT, NO_EXPERT];
    let routing = Routing::new(&ctx, 3, 2, &ids, &[1.0, 0.0, 0.5, 0.5, 0.0, 0.0]).unwrap();
    assert_eq!(routing.to_string(), "0: 2 (1.0000)\n1: 0 (0.5000), 1 (0.5000)\n2:\n");
    assert_eq!(routing.num_choices(), 3);
    let dispatch = Dispatch::new(&ctx, &routing, 0.0);
    assert_eq!((dispatch.num_rows(), dispatch.num_choices(), dispatch.num_dropped()), (3, 3, 0));
    assert_eq!(dispatch.tokens_per_expert(), [1, 1, 1]);
    let twice = Routing::new(&ctx, 3, 2, &[1, 1], &[0.5, 0.5]).unwrap_err();
    assert_eq!(twice.to_string(), "token 0 has expert 1 twice: must be at most once");
}

#[test]
fn the_rule_says_who_is_served() {
    let ctx = Context::cpu(2);
    let routing = Routing::new(&ctx, 2, 1, &[0, 0, 0, 1, 0, 0], &[1.0; 6]).unwrap();
    let kept = |change: &dyn Fn(&mut DispatchRule<'_>)| {
        let mut rule = DispatchRule::new(&routing, 0.5);
        change(&mut rule);
        let dispatch = Dispatch::with_rule(&ctx, &routing, &rule);
        assert_eq!(dispatch.tokens_per_expert(), [5, 1]);
        assert_eq!(dispatch.num_rows() + dispatch.num_dropped(), 6);
        dispatch.row_tokens().to_vec()
    };
    assert_eq!(kept(&|_| ()), [0, 1, 3]);
    // Groups of three tokens with a capacity of one each.
    assert_eq!(kept(&|rule| rule.group_tokens = 3), [0, 4, 3]);
    // A fixed number of rows per group overrides the factor; one that cannot overflow drops nothing.
    assert_eq!(kept(&|rule| (rule.group_tokens, rule.fixed) = (3, Some(1))), [0, 4, 3]);
    assert_eq!(kept(&|rule| (rule.group_tokens, rule.fixed) = (3, Some(2))), [0, 1, 4, 5, 3]);
    assert_eq!(kept(&|rule| (rule.group_tokens, rule.fixed) = (3, Some(3))), [0, 1, 2, 4, 5, 3]);
    assert_eq!(kept(&|rule| rule.fixed = Some(4)), [0, 1, 2, 4, 3]);
    let priority = [0.1, 0.5, 0.9, 0.2, 0.9, 0.3];
    let by_priority = Dispatch::with_rule(
        &ctx,
        &routing,
        &DispatchRule { priority: Some(&priority), ..DispatchRule::new(&routing, 0.5) },
    );
    assert_eq!(by_priority.row_tokens(), [2, 4, 3]);
}

#[test]
fn an_expert_that_computes_nothing_has_room_and_no_rows() {
    let ctx = Context::cpu(2);
    // Experts 0 and 1 compute, 2 does not.
    let routing = Routing::new(&ctx, 3, 1, &[2, 0, 2, 1, 2, 0], &[1.0; 6]).unwrap();
    let rule =
        |capacity_factor| DispatchRule { num_zero_computation: 1, ..DispatchRule::new(&routing, capacity_factor) };
    let all = Dispatch::with_rule(&ctx, &routing, &rule(0.0));
    assert_eq!((all.tokens_per_expert(), all.offsets(), all.num_dropped()), (&[2, 1, 3][..], &[0, 2, 3][..], 0));
    let none = NO_EXPERT;
    assert_eq!(all.zero_computation_choices().unwrap(), [0, none, 0, none, 0, none]);
    let tight = Dispatch::with_rule(&ctx, &routing, &rule(0.5));
    assert_eq!((tight.kept_per_expert(), tight.num_dropped()), (vec![1, 1, 1], 3));
    // MoE++'s shares: with tau 0.5 a computing expert takes half of a zero-computation expert's, 6 tau / (2 tau + 1)
    // = 1.5.
    let shares = Dispatch::with_rule(&ctx, &routing, &DispatchRule { zero_computation_ratio: 0.5, ..rule(1.0) });
    assert_eq!((shares.capacity(), shares.kept_per_expert()), (2, vec![2, 1, 3]));
}

#[test]
fn the_capacity_is_the_documented_one() {
    assert_eq!(capacity(1.0, 2048, 1, 128), Some(16));
    assert_eq!(capacity(1.25, 100, 2, 8), Some(32)); // 31.25
    assert_eq!(capacity(1.1, 10, 1, 1), Some(11)); // not 12, although 1.1 is no float
    assert_eq!(capacity(0.1, 30, 1, 1), Some(3));
    assert_eq!(capacity(-2.0, 10, 1, 4), Some(5));
    assert_eq!(capacity(0.0, 10, 1, 4), None);
    assert_eq!(capacity(1e-30, 10, 1, 4), Some(1));
    assert_eq!(capacity(1.0, 0, 1, 4), Some(0));
    assert!(capacity(f32::MAX, 1 << 20, 8, 4).unwrap() >= 1 << 20);
    let ctx = Context::cpu(1);
    let of = |factor| Dispatch::new(&ctx, &routing(&ctx), factor).capacity();
    assert_eq!([of(4.0), of(0.0), of(-4.0), of(-1.0), of(f32::MAX)], [6, 3, 3, 2, usize::MAX]);
}

#[test]
fn figures_of_a_load() {
    let even = [5_u32, 5, 5, 5];
    assert_eq!((cv(&even), expert_diversity(&even), max_over_mean(&even)), (0.0, 1.0, 1.0));
    let one = [0_u64, 0, 12, 0];
    assert_eq!((expert_diversity(&one), dead_expert_frac(&one), e_max_violation(&one)), (0.25, 0.75, 3.0));
    assert!((cv(&one) - 3.0_f64.sqrt()).abs() < 1e-12);
    assert!((load_entropy(&[1_u32, 1, 2]) - 1.5 * 2.0_f64.ln()).abs() < 1e-12);
    for none in [&[0_u32, 0][..], &[]] {
        let figures =
            [cv(none), expert_diversity(none), max_over_mean(none), load_entropy(none), e_max_violation(none)];
        assert_eq!(figures, [0.0, 0.0, 1.0, 0.0, 0.0]);
    }
    // Sums over a long run may reach u64's maximum.
    assert_eq!((cv(&[u64::MAX; 2]), max_over_mean(&[u64::MAX, 0])), (0.0, 2.0));
    assert_eq!((share(1, 4), share(0, 0)), (0.25, 0.0));
}

#[test]
fn merged_statistics_are_those_of_all_tokens() {
    let part = |num_tokens: usize, count: u32, p: f32, z: f64| LayerStats {
        num_tokens,
        num_choices: num_tokens,
        num_dropped: 1,
        num_rerouted: 3,
        tokens_per_expert: vec![count, 1],
        kept_per_expert: vec![count - 1, 1],
        tokens_per_group: vec![count, 0],
        mean_prob: vec![p, 1.0 - p],
        mean_entropy: z / 2.0,
        z,
        mean_squared_logit: 9.0 * z,
        sequence_loss: 0.0,
        gshard_loss: f64::from(count),
        importance: vec![0.5, 0.25],
        smooth_load: vec![1.0, 2.0],
        modalities: Vec::new(),
        zero_computation: ZeroComputationShare::default(),
    };
    let mut total = LayerStats::empty(2);
    total.merge(&LayerStats::empty(2));
    assert_eq!(total, LayerStats::empty(2));
    total.merge(&part(3, 2, 0.5, 1.0));
    assert_eq!(total, part(3, 2, 0.5, 1.0));
    total.merge(&part(9, 8, 1.0, 5.0));
    assert_eq!((total.num_tokens, total.num_dropped, &total.tokens_per_expert[..]), (12, 2, &[10, 2][..]));
    assert_eq!(total.tokens_per_group, [10, 0]);
    assert_eq!((total.mean_prob[0], total.z, total.mean_entropy), (0.875, 4.0, 2.0));
    assert!((total.drop_rate() - 1.0 / 6.0).abs() < 1e-12);
    assert_eq!((total.reroute_rate(), total.logit_rms()), (0.5, 6.0));
    assert!((total.mean_prob_entropy() - 0.376_770).abs() < 1e-5);
}
