//! The machine's name.

use moeworks_ops::Context;

/// The processor as it calls itself (of virtual ones some say less than all: the family and the model go with it), or the GPU.
pub(super) fn name(ctx: &Context) -> String {
    if let Some(gpu) = ctx.gpu() {
        return gpu.name().to_owned();
    }
    // Linux alone has this file; elsewhere the architecture must do.
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        let mut fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    };
    match (field("model name"), field("cpu family"), field("model")) {
        (Some(name), Some(family), Some(model)) => format!("{name} (family {family}, model {model})"),
        (Some(name), ..) => name.to_owned(),
        // Arm's have numbers alone: `lscpu` has a table of their names.
        _ => match (field("CPU implementer"), field("CPU part")) {
            (Some(implementer), Some(part)) => {
                format!("{} (implementer {implementer}, part {part})", std::env::consts::ARCH)
            }
            _ => std::env::consts::ARCH.to_owned(),
        },
    }
}

/// The machine, and what of it computes.
pub(super) fn describe(ctx: &Context) -> String {
    if ctx.gpu().is_some() { name(ctx) } else { format!("{}, {}", name(ctx), ctx.describe()) }
}
