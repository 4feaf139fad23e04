//! The seconds of a microbatch on a pipeline rank: F, B and W, and the collectives among them.

use super::{PassTimes, Step};
use crate::cost::fabric::{ExpertRows, LinkCost, Members};
use crate::cost::passes::{LAYER_PASSES, OperandBytes, ROTARY_PASSES, ROW_PASSES, SORT_PASSES};
use crate::cost::pipeline::overlapped_seconds;
use crate::machine::LayerRest;
use crate::{Algorithm, Precision, Recompute};

/// Products with the weights of one part of a layer, on a rank.
#[derive(Clone, Copy, Debug)]
struct Products {
    /// Rows.
    tokens: f64,
    /// Parameters that each row is multiplied with.
    params: f64,
    /// Parameters that the rank holds.
    held: f64,
    /// Numbers of a row in inputs and outputs.
    elements: f64,
    /// Bytes of the gradient of a weight.
    gradient_bytes: f64,
    /// True for products that stay in bf16 among FP8 ones: the output projection (2412.19437, section 3.3.1).
    is_wide: bool,
}

/// The seconds of F, B and W of one part, over all layers of a rank.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    forward: f64,
    input_grad: f64,
    weight_grad: f64,
}

impl Part {
    fn sum(&self) -> f64 {
        self.forward + self.input_grad + self.weight_grad
    }

    fn times(self, times: f64) -> Self {
        Self {
            forward: self.forward * times,
            input_grad: self.input_grad * times,
            weight_grad: self.weight_grad * times,
        }
    }
}

/// The seconds of a microbatch on a pipeline rank, by what they are spent on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Passes {
    pub(super) products: f64,
    pub(super) attention: f64,
    pub(super) elementwise: f64,
    pub(super) tensor: f64,
    pub(super) context: f64,
    /// All-to-alls that the experts of the same layer do not hide.
    pub(super) exposed_experts: f64,
    /// All all-to-alls.
    pub(super) raw_experts: f64,
    pub(super) path: Algorithm,
    pub(super) chunks: usize,
    /// The cost of all collectives, hidden or not.
    pub(super) links: LinkCost,
    forward: f64,
    input_grad: f64,
    weight_grad: f64,
}

impl Passes {
    /// Returns F, B and W with all that stands in them.
    pub(super) fn times(&self) -> PassTimes {
        PassTimes {
            forward: self.forward,
            input_grad: self.input_grad,
            weight_grad: self.weight_grad,
            hidden_by_pairs: self.exposed_experts,
        }
    }
}

/// The all-to-alls of a layer with experts.
struct ExpertExchange {
    path: Algorithm,
    chunks: usize,
    /// Dispatch, and combine.
    one_way: LinkCost,
    /// Seconds of a forward and of a backward that the experts do not hide.
    exposed: [f64; 2],
    /// Collectives of expert-tensor parallelism in a forward.
    sliced: LinkCost,
}

impl Step<'_> {
    /// Returns the seconds of products. A product takes its operations at the rate of large ones, and the time to
    /// read and write its operands: so narrow ones reach less. Gradients of weights are added to those of the
    /// microbatches before. On a measured machine a product takes the time of one with as many rows.
    fn products(&self, of: &Products) -> Part {
        if let Some(machine) = &self.fabric.machine {
            // Rows of each matrix, of which the experts of a rank are many.
            let rows = of.tokens * of.params / of.held.max(1.0);
            let (width, expert_width) = (self.job.parts.width as f64, self.job.parts.expert_width as f64);
            let rates = if of.held > of.params {
                machine.experts(self.job.precision, [rows, width, expert_width / self.mesh.etp as f64])
            } else {
                machine.products(self.job.precision, [rows, width])
            };
            let flops = 2.0 * of.tokens * of.params;
            let grad = rates.backward_seconds(flops) / 2.0;
            return Part { forward: rates.forward_seconds(flops), input_grad: grad, weight_grad: grad };
        }
        let rates = &self.fabric.rates;
        let is_fp8 = self.job.precision == Precision::Fp8 && !of.is_wide;
        let wide = self.job.precision.beside_fp8();
        let bytes = OperandBytes::new(if of.is_wide { wide } else { self.job.precision });
        let rate = if is_fp8 { rates.fp8_flops } else { rates.flops };
        let operations = 2.0 * of.tokens * of.params / rate;
        let pass =
            operations + (of.held * bytes.weight + of.tokens * of.elements * bytes.forward) / rates.pass_bytes_per_s;
        // The first microbatch writes, the others read and write.
        let m = self.microbatches as f64;
        let gradients = of.held * of.gradient_bytes * (2.0 * m - 1.0) / m;
        let grad = operations + (gradients + of.tokens * of.elements * bytes.weight_grad) / rates.pass_bytes_per_s;
        Part { forward: pass, input_grad: pass, weight_grad: grad }
    }

    fn all_products(&self) -> (Part, Part, f64) {
        let (parts, mesh) = (&self.job.parts, self.mesh);
        let (tokens, tp) = (self.tokens(), mesh.tp as f64);
        let own = tokens / tp;
        let (layers, moe) = ((parts.num_layers + parts.num_mtp_layers) as f64, self.moe_layers());
        let width = parts.width as f64;
        let gradient_bytes = 4.0;
        let of = |tokens: f64, params: f64, elements: f64| Products {
            tokens,
            params,
            held: params,
            elements,
            gradient_bytes,
            is_wide: false,
        };
        let cut = |params: f64, elements: f64| self.products(&of(tokens, params / tp, elements));
        let whole = |params: f64| self.products(&of(own, params, 2.0 * width + params / width));
        // Inputs of the two kinds of products, and their outputs.
        let around = |hidden: f64| 2.0 * width + (parts.activation_inputs as f64 + 1.0) * hidden;
        let matrices = parts.activation_inputs as f64 + 1.0;
        let dense_hidden = parts.dense_params / width / matrices / tp;
        let attention = 2.0 * width + (parts.query_elements + parts.key_value_elements + parts.value_elements) / tp;
        let held = parts.num_experts.div_ceil(mesh.ep) as f64 * parts.expert_params / mesh.etp as f64;
        // The tokens of all ranks that share an expert's slices pass through each of them.
        let rows = own * self.hot.time * parts.top_k as f64 * mesh.etp as f64;
        let expert_width = parts.expert_width as f64 / mesh.etp as f64;
        let experts = self.products(&Products {
            held,
            gradient_bytes: self.job.expert_gradient_bytes as f64,
            ..of(rows, parts.expert_params / mesh.etp as f64, around(expert_width))
        });
        let head = of(tokens, parts.head_params() / tp, width + parts.vocabulary as f64 / tp);
        let head = self.products(&Products { is_wide: true, ..head }).times(1.0 + parts.num_mtp_layers as f64);
        let dense = layers - moe;
        let each = [
            (layers, cut(parts.attention_params, attention)),
            (dense, cut(parts.dense_params, around(dense_hidden))),
            (moe, whole(parts.shared_params + parts.router_params)),
            (moe, experts),
        ];
        let sum = |of: fn(&Part) -> f64| each.iter().map(|(times, part)| times * of(part)).sum();
        let all = Part {
            forward: sum(|part| part.forward),
            input_grad: sum(|part| part.input_grad),
            weight_grad: sum(|part| part.weight_grad),
        };
        (all, head, experts.forward)
    }

    fn moe_layers(&self) -> f64 {
        let parts = &self.job.parts;
        (parts.num_moe_layers + if parts.num_moe_layers > 0 { parts.num_mtp_layers } else { 0 }) as f64
    }

    /// Returns the seconds of the products that widen the narrow vectors of latent attention, in a forward of all
    /// layers. Selective recomputation does them again (2412.19437, section 3.2.3).
    fn widened(&self) -> f64 {
        let (parts, tp) = (&self.job.parts, self.mesh.tp as f64);
        let layers = (parts.num_layers + parts.num_mtp_layers) as f64;
        let params = parts.up_projection_params / tp;
        let elements = parts.latent_elements + (parts.query_elements + parts.key_value_elements) / tp;
        let tokens = self.tokens();
        let part = Products { tokens, params, held: params, elements, gradient_bytes: 0.0, is_wide: false };
        if params > 0.0 { layers * self.products(&part).forward } else { 0.0 }
    }

    /// Returns the seconds of causal attention in a forward of all layers.
    fn attention(&self) -> f64 {
        let parts = &self.job.parts;
        let layers = (parts.num_layers + parts.num_mtp_layers) as f64;
        let flops = self.tokens() * parts.score_flops(self.job.seq_len as f64) / self.mesh.tp as f64;
        let Some(machine) = &self.fabric.machine else { return layers * flops / self.fabric.rates.attention_flops };
        // The width of a head, if each has keys of its own.
        let head_dim = parts.query_elements / parts.max_tp.max(1) as f64;
        let rate = match machine.attention(self.job.precision, [self.job.seq_len as f64, head_dim]) {
            Some(rates) => rates.training,
            None => machine.product_rate(self.job.precision, [self.tokens(), parts.width as f64]),
        };
        layers * flops / rate
    }

    /// Returns the seconds of what is no product in a forward of all layers.
    fn elementwise(&self) -> f64 {
        let (parts, own) = (&self.job.parts, self.tokens() / self.mesh.tp as f64);
        let (layers, moe) = ((parts.num_layers + parts.num_mtp_layers) as f64, self.moe_layers());
        let width = parts.width as f64;
        if let Some(machine) = &self.fabric.machine {
            let moe_share = moe / layers.max(1.0);
            return layers
                * machine.layer_seconds(LayerRest {
                    kept_bytes: self.kept_bytes(layers, moe) / layers.max(1.0),
                    choices: moe_share * own * parts.top_k as f64,
                    scores: moe_share * own * parts.num_experts as f64,
                    weights: parts.layer_params() / self.mesh.tp as f64 / parts.num_layers.max(1) as f64
                        + moe_share * parts.num_experts.div_ceil(self.mesh.ep) as f64 * parts.expert_params
                            / self.mesh.etp as f64,
                });
        }
        // The activation reads its inputs, and writes an output.
        let activation = (parts.activation_inputs + 1) as f64;
        let dense = (layers - moe) * parts.dense_params / width;
        let shared = moe * parts.shared_params / width;
        let rows = moe * parts.top_k as f64 * self.hot.time;
        let is_sorted = parts.num_experts.div_ceil(self.mesh.ep) > 1;
        let sorted = if is_sorted { self.mesh.etp as f64 * SORT_PASSES * width } else { 0.0 };
        let routed = rows * (ROW_PASSES * width + sorted + activation * parts.expert_width as f64);
        let rotated = ROTARY_PASSES * (parts.query_elements + parts.key_value_elements);
        let numbers = layers * (LAYER_PASSES * width + rotated) + dense + shared + routed;
        own * numbers * self.job.precision.bytes() as f64 / self.fabric.rates.pass_bytes_per_s
    }

    /// Returns the collectives of tensor parallelism in a forward of all layers: an all-gather and a reduce-scatter
    /// around each attention and each dense feed-forward.
    fn tensor(&self) -> LinkCost {
        let (parts, mesh) = (&self.job.parts, self.mesh);
        let (layers, moe) = ((parts.num_layers + parts.num_mtp_layers) as f64, self.moe_layers());
        let bytes = self.tokens() * parts.width as f64 * self.job.practice.sum_bytes;
        let group = Members { num: mesh.tp, stride: 1 };
        self.fabric.all_reduce(group, bytes).times(layers + (layers - moe) + 1.0)
    }

    /// Returns the ring of keys and values in a forward of all layers.
    fn context(&self) -> LinkCost {
        let (parts, mesh) = (&self.job.parts, self.mesh);
        let layers = (parts.num_layers + parts.num_mtp_layers) as f64;
        let bytes = self.tokens() * parts.key_value_elements * self.job.precision.bytes() as f64 / mesh.tp as f64;
        let hop = self.fabric.send(Members { num: mesh.cp, stride: mesh.tp }, bytes);
        hop.times(layers * (mesh.cp as f64 - 1.0))
    }

    /// Returns the exchange of a layer with experts, on its fastest path in the best number of chunks.
    fn exchange(&self, experts_s: f64) -> ExpertExchange {
        let (parts, mesh, practice) = (&self.job.parts, self.mesh, &self.job.practice);
        let bytes = self.job.precision.bytes() as f64;
        // The hottest rank receives more than it sends.
        let tokens = self.tokens() / mesh.tp as f64 * self.hot.time;
        let row_bytes = parts.width as f64 * (practice.dispatch_bytes.unwrap_or(bytes) + bytes) / 2.0;
        let rows = ExpertRows {
            tokens,
            top_k: parts.top_k,
            num_experts: parts.num_experts,
            row_bytes,
            max_units: parts.max_units,
        };
        let (path, one_way) = self.fabric.fastest_all_to_all(self.expert_group(), &rows, practice.paths);
        let empty = self.fabric.all_to_all(self.expert_group(), path, &ExpertRows { tokens: 0.0, ..rows }).total();
        let exposed = |chunks: usize, compute: f64| {
            let r = chunks as f64;
            let transfer = empty + (one_way.total() - empty) / r;
            (overlapped_seconds(chunks, transfer, compute / r) - compute).max(0.0)
        };
        let both = |chunks: usize| [exposed(chunks, experts_s), exposed(chunks, 2.0 * experts_s)];
        let mut best = (1, both(1));
        let mut chunks = 2;
        while chunks <= practice.max_chunks && mesh.ep > 1 {
            let other = both(chunks);
            if other[0] + other[1] < best.1[0] + best.1[1] {
                best = (chunks, other);
            }
            chunks *= 2;
        }
        let slices = Members { num: mesh.etp, stride: 1 };
        let gathered = tokens * parts.top_k as f64 * parts.width as f64 * bytes * mesh.etp as f64;
        let sliced = self.fabric.all_reduce(slices, gathered);
        ExpertExchange { path, chunks: best.0, one_way, exposed: best.1, sliced }
    }

    /// Returns the passes of a microbatch on the slowest pipeline rank.
    pub(super) fn passes(&self) -> Passes {
        let (layers, head, experts_s) = self.all_products();
        let (attention, elementwise, moe) = (self.attention(), self.elementwise(), self.moe_layers());
        let (tensor, ring, exchange) = (self.tensor(), self.context(), self.exchange(experts_s));
        let context = [(ring.total() - attention).max(0.0), (2.0 * ring.total() - 2.0 * attention).max(0.0)];
        let sliced = moe * exchange.sliced.total();
        let one_way = moe * exchange.one_way.total();
        let again = match self.mesh.recompute {
            Recompute::None => [0.0, 0.0],
            Recompute::Selective => [0.0, 1.0],
            Recompute::Full => [1.0, 1.0],
        };
        let widened = (again[1] - again[0]) * self.widened();
        let share = self.share(layers.sum() + 3.0 * (attention + elementwise), head.sum());
        // A forward, and its parts that are done again in the backward: all but elementwise parts, and those.
        let [all, cheap] = again;
        let exposed = [moe * exchange.exposed[0] + sliced, moe * exchange.exposed[1] + sliced];
        let forward =
            layers.forward + head.forward + attention + elementwise + tensor.total() + context[0] + exposed[0];
        let repeated = all * (layers.forward + attention + tensor.total() + context[0] + exposed[0])
            + cheap * elementwise
            + widened;
        let input_grad = layers.input_grad
            + head.input_grad
            + 2.0 * (attention + elementwise)
            + tensor.total()
            + context[1]
            + exposed[1]
            + repeated;
        let passes_of_links = 2.0 + all;
        let links = exchange.one_way.times(2.0 * moe * passes_of_links)
            + exchange.sliced.times(moe * passes_of_links)
            + tensor.times(passes_of_links)
            + ring.times(3.0 + all);
        Passes {
            products: share * (layers.sum() + head.sum() + all * layers.forward + widened),
            attention: share * attention * (3.0 + all),
            elementwise: share * elementwise * (3.0 + cheap),
            tensor: share * tensor.total() * passes_of_links,
            context: share * (context[0] * (1.0 + all) + context[1]),
            exposed_experts: share * (exposed[0] * (1.0 + all) + exposed[1]),
            raw_experts: share * (2.0 * one_way + sliced) * passes_of_links,
            path: exchange.path,
            chunks: exchange.chunks,
            links: links.times(share),
            forward: share * forward,
            input_grad: share * input_grad,
            weight_grad: share * (layers.weight_grad + head.weight_grad),
        }
    }
}
