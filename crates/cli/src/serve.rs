//! `moeworks serve`: answers over HTTP.

use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use moeworks_infer::chat::ChatTemplate;
use moeworks_infer::open::{Model, Source};
use moeworks_infer::system::System;
use moeworks_model::PagedKvCache;
use moeworks_serve::server::{ApiKeys, ServedModel, ServerOptions, StopSignal};
use moeworks_serve::{Engine, Limits, server};
use moeworks_tensor::DType;

use crate::args::{AccessArgs, LoadArgs, ServeArgs};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::model::open;

/// Blocks of keys and values at least: fewer serve nobody.
const MIN_BLOCKS: usize = 4;
/// Blocks that can be numbered.
const MAX_BLOCKS: usize = u32::MAX as usize;
/// The most seconds of `--shutdown-timeout`.
const MAX_SECONDS: f64 = 86_400.0;

pub(crate) fn run(args: &ServeArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let options = server_options(args)?;
    // An address that is taken is said before the model is loaded.
    let listener = bind(args)?;
    let source = Source::open(&args.model)?;
    let defaults = source.sampling_defaults()?;
    let model = Arc::new(open(&source, &args.compute)?);
    let limits = limits(&args.load, &model)?;
    let engine = Engine::new(&model, limits)?;
    let served = ServedModel {
        names: names(args)?,
        template: template(args, &source, &model)?,
        model: Arc::clone(&model),
        defaults,
        sandbox: call.sandbox()?,
        max_sequence_tokens: limits.max_sequence_tokens().saturating_add(1),
    };
    let options = ServerOptions { num_blocks: limits.num_blocks, ..options };
    say_ready(&listener, &served, &limits)?;
    let stop = StopSignal::default();
    let _receiving = call.interrupts().give_to_server(&stop);
    server::serve(listener, served, engine, options, &stop)
        .map_err(|error| Failure::input(format!("the server cannot go on: {error}")))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints that requests are taken, and where.
fn say_ready(listener: &TcpListener, served: &ServedModel, limits: &Limits) -> Result<(), Failure> {
    let address = listener.local_addr()?;
    let Limits { num_blocks, block_len, .. } = *limits;
    println!("serving {} at http://{address} ({num_blocks} blocks of {block_len} tokens)", served.name());
    crate::output::flush();
    Ok(())
}

fn bind(args: &ServeArgs) -> Result<TcpListener, Failure> {
    let ServeArgs { host, port, access, .. } = args;
    let listener = TcpListener::bind((host.as_str(), *port)).map_err(|error| {
        let advice = match error.kind() {
            io::ErrorKind::AddrInUse => "; choose another --port, or 0 for any",
            _ => "",
        };
        Failure::input(format!("--host {host} --port {port}: {error}{advice}"))
    })?;
    let is_open = !listener.local_addr()?.ip().is_loopback();
    if is_open && access.api_key.is_empty() && access.api_key_file.is_none() {
        tracing::warn!("other machines can send requests, and no key is asked for (--api-key-file)");
    }
    Ok(listener)
}

fn server_options(args: &ServeArgs) -> Result<ServerOptions, Failure> {
    let LoadArgs { max_running, max_waiting, shutdown_timeout, ref metrics_prefix, .. } = args.load;
    if !(0.0..=MAX_SECONDS).contains(&shutdown_timeout) {
        let message = format!("--shutdown-timeout {shutdown_timeout}: must be from 0 to {MAX_SECONDS} seconds");
        return Err(Failure::input(message));
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    if !metrics_prefix.chars().all(is_name) || metrics_prefix.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(Failure::input(format!("--metrics-prefix {metrics_prefix:?}: must be letters, digits, _ and :")));
    }
    Ok(ServerOptions {
        keys: keys(&args.access)?,
        allowed_hosts: args.access.allowed_host.clone(),
        max_running,
        max_waiting,
        metrics_prefix: metrics_prefix.clone(),
        shutdown_timeout: Duration::from_secs_f64(shutdown_timeout),
        ..ServerOptions::default()
    })
}

/// Reads the keys of the options and of their file. A key is never shown.
fn keys(args: &AccessArgs) -> Result<ApiKeys, Failure> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let shown = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::input(format!("--api-key-file {shown}: {error}")))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let before = keys.len();
        keys.extend(lines.map(str::to_owned));
        if keys.len() == before {
            return Err(Failure::input(format!("--api-key-file {shown}: has no key; give one a line")));
        }
    }
    let is_key = |key: &String| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
    if !keys.iter().all(is_key) {
        return Err(Failure::input("a key must be of printable ASCII characters without blanks, and not empty"));
    }
    Ok(ApiKeys::new(keys))
}

/// The names that requests may use: those given, or that of the folder or file.
fn names(args: &ServeArgs) -> Result<Vec<String>, Failure> {
    if let Some(name) = args.served_model_name.iter().find(|name| name.is_empty() || name.contains(char::is_control)) {
        return Err(Failure::input(format!("--served-model-name {name:?}: must be printable text, and not empty")));
    }
    if !args.served_model_name.is_empty() {
        return Ok(args.served_model_name.clone());
    }
    Ok(vec![name_of(&args.model)])
}

fn name_of(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_gguf = whole.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { whole.file_stem() } else { whole.file_name() };
    let name = name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
    name.replace(char::is_control, "_")
}

fn template(args: &ServeArgs, source: &Source, model: &Model) -> Result<Option<ChatTemplate>, Failure> {
    if let Some(path) = &args.chat_template {
        return Ok(Some(ChatTemplate::from_file(path, &model.tokenizer)?));
    }
    Ok(source.chat_template(&model.tokenizer)?)
}

/// Decides how many blocks of keys and values there are, and the other bounds.
fn limits(args: &LoadArgs, model: &Model) -> Result<Limits, Failure> {
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
        // Whoever is told to wait is bounded by the server; the scheduler sees also those that will run in the next
        // turn.
        max_waiting: max_running.saturating_add(max_waiting),
        has_prefix_cache: !args.no_prefix_cache,
        ..Limits::default()
    };
    limits.check()?;
    Ok(limits)
}

/// Returns the blocks that fit in the memory for keys and values, or that as many answers as run at a time need.
fn num_blocks(args: &LoadArgs, model: &Model) -> Result<usize, Failure> {
    let config = model.decoder.config();
    // Keys and values are in single precision at most.
    let block_bytes = PagedKvCache::bytes_per_token(config, DType::F32).max(1).saturating_mul(args.block_len);
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
