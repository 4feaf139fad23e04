//! `moeworks serve`: answers requests over HTTP.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

use moeworks_infer::chat::ChatTemplate;
use moeworks_infer::open::{Model, Source};
use moeworks_infer::routing_record::RecordSource;
use moeworks_infer::system::System;
use moeworks_model::{KvType, PagedKvCache};
use moeworks_serve::server::{ApiKeys, FailureSignal, KvCacheInfo, Loading, ServedModel, ServerOptions, StopSignal};
use moeworks_serve::{Engine, Limits, server};
use moeworks_tensor::DType;

use crate::args::{AccessArgs, KvTypeChoice, LoadArgs, LogFormat, ServeArgs};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::files::text_of;
use crate::host::Call;
use crate::listening::{Address, bind, check_metrics_prefix, scheme, seconds, server_tls};
use crate::log;
use crate::model_ranks::{LastWords, ModelOptions, ModelRank, on_model_ranks};
use crate::record;
use crate::serve_rebalance;

/// Bytes of a file of keys at most.
const MAX_KEY_BYTES: u64 = 1 << 20;
/// The smallest number of blocks of keys and values.
const MIN_BLOCKS: usize = 4;
/// The largest number of blocks that can be numbered.
const MAX_BLOCKS: usize = u32::MAX as usize;

pub(crate) fn run(args: &ServeArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let failure = FailureSignal::default();
    let (options, signal) = (ModelOptions { compute: &args.compute, ranks: &args.ranks }, failure.clone());
    let last_words: LastWords = Arc::new(move |error| signal.fail(error));
    on_model_ranks(call, &args.model, options, Some(last_words), |rank| one_rank(args, rank, call, &failure))
}

/// Serves on the rank that makes the passes.
fn one_rank(
    args: &ServeArgs,
    rank: ModelRank<'_>,
    call: &Call<'_>,
    failure: &FailureSignal,
) -> Result<ExitCode, Failure> {
    let options = ServerOptions { failure: failure.clone(), ..server_options(args)? };
    record::check(&args.record)?;
    log::set_json(args.log_format == LogFormat::Json);
    // The address is bound first, so that one in use is reported before the model is loaded.
    let listener = listen(args)?;
    let loading = Loading::begin(&listener, options.tls.clone())?;
    let source = Source::open(&args.model)?;
    let defaults = source.sampling_defaults()?;
    let model = Arc::new(rank.open(&source)?);
    let limits = limits(&args.load, &model)?;
    let kv_type = kv_type(&args.load, &model)?;
    let mut engine = Engine::with_kv_type(&model, limits, kv_type)?;
    engine.rebalance(serve_rebalance::options(&args.rebalance, &model)?)?;
    if let Some(recorder) = record::begin(&args.record, RecordSource::Serve, &model, &args.model)? {
        engine.record_routing(recorder);
    }
    let served = ServedModel {
        names: names(args)?,
        template: template(args.chat_template.as_deref(), &source, &model)?,
        model: Arc::clone(&model),
        defaults,
        sandbox: call.sandbox()?,
        max_sequence_tokens: limits.max_sequence_tokens().saturating_add(1),
    };
    let kv_cache = kv_cache(&limits, kv_type, &model);
    drop(loading);
    let scheme = scheme(options.tls.as_ref());
    say_ready(&format!("{scheme}://{}", listener.local_addr()?), &served, &limits, &kv_cache);
    let options = ServerOptions { num_blocks: limits.num_blocks, kv_cache, ..options };
    let stop = StopSignal::default();
    let _receiving = call.interrupts().give_to_server(&stop);
    server::serve(listener, served, engine, options, &stop)
        .map_err(|error| Failure::input(format!("the server failed: {error}")))?;
    model.end_ranks()?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the address at which requests are accepted.
fn say_ready(url: &str, served: &ServedModel, limits: &Limits, kv_cache: &KvCacheInfo) {
    let Limits { num_blocks, block_len, .. } = *limits;
    println!("serving {} at {url} ({num_blocks} blocks of {block_len} tokens)", served.name());
    crate::output::flush();
    let KvCacheInfo { dtype, bytes_per_token, .. } = kv_cache;
    tracing::info!("keys and values in {dtype}: {bytes_per_token} bytes a token");
}

/// Facts about keys and values, for metrics.
fn kv_cache(limits: &Limits, kv_type: KvType, model: &Model) -> KvCacheInfo {
    let dtype = kv_type.dtype(activations(model));
    KvCacheInfo {
        block_len: limits.block_len,
        dtype: format!("{dtype:?}").to_lowercase(),
        bytes_per_token: PagedKvCache::bytes_per_token(model.decoder.config(), dtype),
    }
}

/// Listens at the address, and warns where everybody can send requests.
fn listen(args: &ServeArgs) -> Result<TcpListener, Failure> {
    let ServeArgs { host, port, access, .. } = args;
    let listener = bind(&Address { host, port: *port })?;
    let is_open = !listener.local_addr()?.ip().is_loopback();
    if is_open && access.api_key.is_empty() && access.api_key_file.is_none() {
        tracing::warn!("other machines can send requests without a key; set one with --api-key-file");
    }
    Ok(listener)
}

fn server_options(args: &ServeArgs) -> Result<ServerOptions, Failure> {
    let LoadArgs { max_running, max_waiting, shutdown_timeout, request_timeout, ref metrics_prefix, .. } = args.load;
    check_metrics_prefix(metrics_prefix)?;
    let request_timeout = seconds("--request-timeout", request_timeout)?;
    Ok(ServerOptions {
        keys: keys(&args.access)?,
        tls: server_tls(&args.tls)?,
        allowed_hosts: args.access.allowed_host.clone(),
        max_running,
        max_waiting,
        metrics_prefix: metrics_prefix.clone(),
        shutdown_timeout: seconds("--shutdown-timeout", shutdown_timeout)?,
        request_timeout: Some(request_timeout).filter(|time| !time.is_zero()),
        ..ServerOptions::default()
    })
}

/// Reads the keys from the options and from the file. A key is never printed.
fn keys(args: &AccessArgs) -> Result<ApiKeys, Failure> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let shown = path.display();
        let text = text_of("--api-key-file", path, MAX_KEY_BYTES)?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let before = keys.len();
        keys.extend(lines.map(str::to_owned));
        if keys.len() == before {
            return Err(Failure::input(format!(
                "--api-key-file {shown}: has no key; it must contain one key per line"
            )));
        }
    }
    let is_key = |key: &String| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
    if !keys.iter().all(is_key) {
        return Err(Failure::input("a key must be of printable ASCII characters without blanks, and not empty"));
    }
    Ok(ApiKeys::new(keys))
}

/// Returns the names that requests may use: the given ones, or the name of the folder or file.
fn names(args: &ServeArgs) -> Result<Vec<String>, Failure> {
    if let Some(name) = args.served_model_name.iter().find(|name| name.is_empty() || name.contains(char::is_control)) {
        return Err(Failure::input(format!("--served-model-name {name:?}: must be printable text, and not empty")));
    }
    if !args.served_model_name.is_empty() {
        return Ok(args.served_model_name.clone());
    }
    Ok(vec![name_of(&args.model)])
}

pub(crate) fn name_of(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_gguf = whole.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { whole.file_stem() } else { whole.file_name() };
    let name = name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
    name.replace(char::is_control, "_")
}

/// The chat template: that of a file, or the model's own.
pub(crate) fn template(file: Option<&Path>, source: &Source, model: &Model) -> Result<Option<ChatTemplate>, Failure> {
    match file {
        Some(path) => Ok(Some(ChatTemplate::from_file(path, &model.tokenizer)?)),
        None => Ok(source.chat_template(&model.tokenizer)?),
    }
}

/// Determines the number of blocks of keys and values and the other limits.
pub(crate) fn limits(args: &LoadArgs, model: &Model) -> Result<Limits, Failure> {
    let LoadArgs { max_running, max_waiting, turn_tokens, block_len, .. } = *args;
    if block_len == 0 || block_len > 4096 {
        return Err(Failure::input(format!("--block-len {block_len}: must be from 1 to 4096")));
    }
    if max_running == 0 || max_running > turn_tokens {
        let expected = format!("must be from 1 to --turn-tokens, {turn_tokens}");
        return Err(Failure::input(format!("--max-running {max_running}: {expected}")));
    }
    let limits = Limits {
        num_blocks: num_blocks(args, model)?,
        block_len,
        turn_tokens,
        max_running,
        // The server limits the waiting requests. The scheduler also counts those that will start in the next step.
        max_waiting: max_running.saturating_add(max_waiting),
        has_prefix_cache: !args.no_prefix_cache,
        ..Limits::default()
    };
    limits.check()?;
    Ok(limits)
}

fn activations(model: &Model) -> DType {
    model.weights.compute_dtype().of_activations()
}

/// Returns the number type of keys and values.
pub(crate) fn kv_type(args: &LoadArgs, model: &Model) -> Result<KvType, Failure> {
    let (kv_type, name) = match args.kv_type {
        None => return Ok(KvType::Activations),
        Some(KvTypeChoice::F32) => (KvType::F32, "f32"),
        Some(KvTypeChoice::Bf16) => (KvType::Bf16, "bf16"),
        Some(KvTypeChoice::Q8) => (KvType::Q8, "q8"),
    };
    let wrong = |problem: &str| Failure::input(format!("--kv-type {name}: {problem}"));
    if model.ctx.gpu().is_some() && kv_type.dtype(activations(model)) != activations(model) {
        return Err(wrong("works only on the CPU; choose the device cpu, or leave it out"));
    }
    kv_type.check(model.decoder.config()).map_err(|error| wrong(&error.expected))?;
    Ok(kv_type)
}

/// Returns the number of blocks that fit in the memory for keys and values, or that `--max-running` answers need.
fn num_blocks(args: &LoadArgs, model: &Model) -> Result<usize, Failure> {
    let config = model.decoder.config();
    let dtype = kv_type(args, model)?.dtype(activations(model));
    let block_bytes = PagedKvCache::bytes_per_token(config, dtype).max(1).saturating_mul(args.block_len);
    let Some(gigabytes) = args.kv_memory else {
        let needed = config.max_seq_len.div_ceil(args.block_len).saturating_mul(args.max_running);
        let quarter = System::default().usable_memory_bytes().map_or(usize::MAX, |bytes| (bytes / 4) as usize);
        return Ok((quarter / block_bytes).min(needed).clamp(MIN_BLOCKS, MAX_BLOCKS));
    };
    let least = (MIN_BLOCKS * block_bytes) as f64 / 1e9;
    if !(least..=1e6).contains(&gigabytes) {
        return Err(Failure::input(format!("--kv-memory {gigabytes}: must be a number of GB, at least {least}")));
    }
    Ok(((gigabytes * 1e9) as usize / block_bytes).clamp(MIN_BLOCKS, MAX_BLOCKS))
}
