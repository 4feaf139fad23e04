//! A server with an engine that answers with the alphabet, and a client that writes bytes.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moeworks_infer::chat::{ChatTemplate, Sandbox};
use moeworks_infer::open::{FileDefaults, Model};
use moeworks_model::{Decoder, ModelConfig, Tokenizer};
use moeworks_ops::Context;
use moeworks_serve::server::{ServedModel, ServerOptions, StopSignal, serve};
use moeworks_serve::{Counts, Limits};
use serde_json::Value;

use crate::fake_engine::FakeEngine;

/// Tokens of the context.
pub(crate) const CONTEXT: usize = 512;

/// The set-up of a test's server.
pub(crate) struct Setup {
    pub(crate) limits: Limits,
    pub(crate) delay: Duration,
    pub(crate) options: ServerOptions,
    /// A shell script that takes the place of the process for templates.
    pub(crate) sandbox: &'static str,
    /// The chat template, by which the way of calls is found.
    pub(crate) template: &'static str,
}

impl Default for Setup {
    fn default() -> Self {
        let limits = Limits { num_blocks: 256, block_len: 4, max_running: 16, ..Limits::default() };
        let options = ServerOptions { max_running: 16, max_waiting: 16, num_blocks: 256, ..ServerOptions::default() };
        Self { limits, delay: Duration::from_millis(1), options, sandbox: "cat", template: "{{ messages }}" }
    }
}

pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) stop: StopSignal,
    pub(crate) counts: Arc<Mutex<Counts>>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

fn served(sandbox: &str, template: &str) -> ServedModel {
    let (ctx, tokenizer) = (Context::cpu(1), Tokenizer::bytes());
    let config = ModelConfig {
        vocab_size: tokenizer.vocab_size(),
        width: 16,
        num_layers: 1,
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 16,
        max_seq_len: CONTEXT,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(config).unwrap();
    let weights = decoder.init(&ctx, 7, None);
    let stop_ids = tokenizer.stop_ids(&[]);
    let template = Some(ChatTemplate::new(template.to_owned(), &tokenizer));
    ServedModel {
        names: vec!["tiny".to_owned(), "org/other".to_owned()],
        model: Arc::new(Model { ctx, decoder, weights, tokenizer, stop_ids, part_checked: None }),
        defaults: FileDefaults { sampling: Default::default(), file: "generation_config.json" },
        template,
        sandbox: Sandbox::new("sh", ["-c", sandbox]),
        max_sequence_tokens: usize::MAX,
    }
}

impl TestServer {
    pub(crate) fn start(setup: Setup) -> Self {
        Self::start_on(TcpListener::bind("127.0.0.1:0").unwrap(), setup)
    }

    pub(crate) fn start_on(listener: TcpListener, setup: Setup) -> Self {
        let Setup { mut limits, delay, options, sandbox, template } = setup;
        limits.max_waiting = options.max_running + options.max_waiting;
        let (engine, counts) = FakeEngine::new(limits, delay);
        let (address, stop) = (listener.local_addr().unwrap(), StopSignal::default());
        let (served, told) = (served(sandbox, template), stop.clone());
        let thread = std::thread::spawn(move || serve(listener, served, engine, options, &told));
        Self { address, stop, counts, thread: Some(thread) }
    }

    /// Waits for the server to end by itself, or by its stop signal.
    pub(crate) fn wait(mut self) -> std::thread::Result<std::io::Result<()>> {
        self.thread.take().unwrap().join()
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Sends a request with a body of JSON, and leaves the connection open.
    pub(crate) fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(post(path, "", &body.to_string()).as_bytes()).unwrap();
        stream
    }

    /// Sends bytes and reads an answer.
    pub(crate) fn raw(&self, bytes: impl AsRef<[u8]>) -> Answer {
        let mut stream = self.connect();
        // A server that has answered early does not read.
        let _ = stream.write_all(bytes.as_ref());
        Answer::read(&mut BufReader::new(stream))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::read(&mut BufReader::new(self.send(path, body)))
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.raw(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    }

    /// Waits until no sequence is left, and returns the counts.
    pub(crate) fn idle_counts(&self) -> Counts {
        let start = Instant::now();
        loop {
            let counts = *self.counts.lock().unwrap();
            if counts.running + counts.waiting == 0 {
                return counts;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{counts:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A request with a body of JSON, with further lines of its head.
pub(crate) fn post(path: &str, head: &str, body: &str) -> String {
    let len = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}Content-Length: {len}\r\n\r\n{body}"
    )
}

/// An answer as it came.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: Vec<String>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn read(from: &mut BufReader<impl Read>) -> Self {
        let head = read_head(from);
        let status = head.first().and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or(0);
        let field = |name: &str| head.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
        let mut bytes = Vec::new();
        if field("transfer-encoding: chunked").is_some() {
            while let Some(chunk) = read_chunk(from) {
                bytes.extend(chunk);
            }
        } else if let Some(len) = field("content-length: ") {
            bytes.resize(len.trim().parse().unwrap(), 0);
            from.read_exact(&mut bytes).unwrap();
        }
        Self { status, head, body: String::from_utf8(bytes).unwrap() }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let name = format!("{name}: ");
        self.head.iter().find(|line| line.to_lowercase().starts_with(&name)).map(|line| line[name.len()..].trim())
    }

    /// The code of an error.
    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_else(|| panic!("{self:?}")).to_owned()
    }

    /// The JSON of the events of a stream, which ends as it should.
    pub(crate) fn events(&self) -> Vec<Value> {
        let events = self.body.strip_suffix("data: [DONE]\n\n").unwrap_or_else(|| panic!("{self:?}"));
        let lines = events.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
        lines.map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }
}

/// Reads the head of an answer, up to the empty line.
pub(crate) fn read_head(from: &mut BufReader<impl Read>) -> Vec<String> {
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if from.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
            return head;
        }
        head.push(line.trim_end().to_owned());
    }
}

/// Reads a chunk; none at the end, or where the connection ended.
pub(crate) fn read_chunk(from: &mut BufReader<impl Read>) -> Option<Vec<u8>> {
    let mut line = String::new();
    from.read_line(&mut line).ok()?;
    let len = usize::from_str_radix(line.trim(), 16).ok()?;
    let mut bytes = vec![0; len + 2];
    from.read_exact(&mut bytes).ok()?;
    bytes.truncate(len);
    (len > 0).then_some(bytes)
}
