//! `moeworks serve` with a small model: its answers equal those of `generate` and `chat`, and it shuts down properly.
#![cfg(unix)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stdout};
use crate::python::is_full;

/// A server process, which is killed at the end of the test.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Server {
    /// Starts `serve` and waits until it reports that it is ready.
    pub(crate) fn start(work: &Workplace, args: &[&str]) -> Self {
        Self::of(work.command(&[&["serve", "run", "--port", "0"][..], args].concat()))
    }

    /// Starts a command that listens, and waits until it says where.
    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the program starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("standard output")).read_line(&mut line).expect("a line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Self { child, address }
    }

    /// Sends a request and leaves the connection open.
    pub(crate) fn send(&self, path: &str, body: &Value) -> TcpStream {
        self.send_as("", path, body)
    }

    /// Sends a request with a value of `Authorization`.
    fn send_as(&self, key: &str, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let (body, json) = (body.to_string(), "Content-Type: application/json\r\nConnection: close");
        let len = body.len();
        let method = if body == "null" { "GET" } else { "POST" };
        let body = if body == "null" { "" } else { &body };
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{json}\r\nAuthorization: {key}\r\nContent-Length: {}\r\n\r\n{body}",
            len.min(body.len())
        )
        .expect("sent");
        stream
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        let body = read(self.send(path, body));
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }

    pub(crate) fn post_as(&self, key: &str, path: &str, body: &Value) -> Value {
        let body = read(self.send_as(key, path, body));
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }

    pub(crate) fn get(&self, path: &str) -> String {
        read(self.send(path, &Value::Null))
    }

    /// Reads a value from the metrics.
    pub(crate) fn figure(&self, name: &str) -> f64 {
        let text = self.get("/metrics");
        let line = text.lines().find(|line| line.starts_with(&format!("moeworks_{name}{{"))).expect("a figure");
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    }

    /// Waits until no request is being computed.
    pub(crate) fn wait_until_idle(&self) {
        let start = Instant::now();
        while self.figure("num_requests_running") + self.figure("num_requests_waiting") > 0.0 {
            assert!(start.elapsed() < Duration::from_secs(60), "requests are left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads an answer to the end of the connection and returns its body.
pub(crate) fn read(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    if head.to_lowercase().contains("transfer-encoding: chunked") { dechunked(body) } else { body.to_owned() }
}

fn dechunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((len, rest)) = body.split_once("\r\n") {
        let len = usize::from_str_radix(len, 16).unwrap_or(0);
        if len == 0 {
            break;
        }
        whole += &rest[..len];
        body = rest[len..].trim_start_matches("\r\n");
    }
    whole
}

/// Joins the text of the pieces of a stream, and checks its end.
fn streamed(body: &str) -> String {
    let events = body.strip_suffix("data: [DONE]\n\n").unwrap_or_else(|| panic!("cut off: {body:?}"));
    let piece = |event: &str| -> Value { serde_json::from_str(event.trim_start_matches("data: ")).expect("JSON") };
    let pieces = events.split("\n\n").filter(|event| event.starts_with("data: ")).map(piece);
    pieces.map(|piece| piece["choices"][0]["text"].as_str().unwrap_or_default().to_owned()).collect()
}

pub(crate) fn with_model() -> Workplace {
    let work = Workplace::new();
    assert_success(&work.train("run", 8, &["--set", "model.max_seq_len=256", "--set", "train.lr=1e-2"]));
    work
}

#[test]
fn answers_are_those_of_generate_alone_together_and_in_streams() {
    let work = with_model();
    let server = Server::start(&work, &["--batch-invariant"]);
    let prompts = ["Line 3", "of a text", "Line 3 of a text that is easy to learn, number", "x"];
    let generated = prompts.map(|prompt| {
        let args =
            ["generate", "run", "--batch-invariant", "--prompt", prompt, "--temperature", "0", "--max-tokens", "20"];
        let text = stdout(&work.run(&args));
        text.strip_prefix(prompt).and_then(|text| text.strip_suffix('\n')).expect("a text").to_owned()
    });
    let body = |prompt: &str| json!({"model": "run", "prompt": prompt, "temperature": 0, "max_tokens": 20});
    for (prompt, expected) in prompts.iter().zip(&generated) {
        assert_eq!(server.post("/v1/completions", &body(prompt))["choices"][0]["text"], **expected, "{prompt}");
    }
    // Many requests at once, with the same few prompts.
    let streams: Vec<_> = (0..24)
        .map(|i| {
            let mut body = body(prompts[i % 4]);
            body["stream"] = json!(i % 2 == 0);
            server.send("/v1/completions", &body)
        })
        .collect();
    for (i, stream) in streams.into_iter().enumerate() {
        let body = read(stream);
        let whole =
            || serde_json::from_str::<Value>(&body).expect("JSON")["choices"][0]["text"].as_str().map(str::to_owned);
        let text = if i % 2 == 0 { streamed(&body) } else { whole().expect("a text") };
        assert_eq!(text, generated[i % 4], "{i}");
    }
}

#[test]
fn a_seed_gives_the_same_text_and_choices_differ() {
    let work = with_model();
    let server = Server::start(&work, &["--batch-invariant"]);
    let body = json!({"prompt": "Line 3", "seed": 7, "n": 3, "max_tokens": 20, "temperature": 1.5});
    let texts = || {
        let answer = server.post("/v1/completions", &body);
        (0..3).map(|i| answer["choices"][i]["text"].as_str().expect("a text").to_owned()).collect::<Vec<_>>()
    };
    let first = texts();
    assert_eq!(first, texts());
    assert!(first[0] != first[1] && first[1] != first[2]);
}

#[test]
fn a_chat_is_that_of_the_program_and_keeps_what_turns_have_in_common() {
    let work = with_model();
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{{ effort }}";
    work.file("chat.jinja", template);
    let args =
        ["chat", "run", "--template", "chat.jinja", "--max-tokens", "12", "--temperature", "0", "--batch-invariant"];
    let mut child =
        work.command(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    child.stdin.take().expect("standard input").write_all(b"Line 1 of the chat\n").expect("written");
    let said = stdout(&child.wait_with_output().expect("ended"));
    let server = Server::start(&work, &["--batch-invariant", "--chat-template", "chat.jinja", "--block-len", "4"]);
    let message = json!({"role": "user", "content": "Line 1 of the chat"});
    let body = json!({"messages": [message], "temperature": 0, "max_tokens": 12});
    let answer = server.post("/v1/chat/completions", &body);
    let content = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    assert_eq!(content.trim_end_matches('\n'), said.trim_end_matches('\n'));
    // The next turn starts with the whole of this one.
    let before = server.figure("prefix_cache_hits_total");
    let messages = json!([message, {"role": "assistant", "content": content}, {"role": "user", "content": "And now?"}]);
    server.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 4}));
    assert!(server.figure("prefix_cache_hits_total") >= before + 24.0);
    let tokens = |more: Value| {
        let mut body = json!({"messages": [message, {"role": "assistant", "content": "Yes, "}]});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let tokens = server.post("/tokenize", &body)["tokens"].clone();
        server.post("/detokenize", &json!({"tokens": tokens}))["prompt"].as_str().expect("a text").to_owned()
    };
    let said = "user: Line 1 of the chat\nassistant: Yes,";
    assert_eq!(tokens(json!({"continue_final_message": true})), said);
    let variables = json!({"add_generation_prompt": false, "chat_template_kwargs": {"effort": "high"}});
    assert_eq!(tokens(variables), format!("{said} \nhigh"));
}

#[test]
fn a_thousand_clients_that_go_away_at_random_leave_no_block_behind() {
    let work = with_model();
    let server = Server::start(&work, &["--max-running", "8"]);
    let mut clients = Vec::new();
    for i in 0_u64..1000 {
        let body = json!({"prompt": "Line ".repeat(1 + i as usize % 7), "max_tokens": 150, "stream": i % 2 == 0, "ignore_eos": true});
        clients.push(server.send("/v1/completions", &body));
        std::thread::sleep(Duration::from_millis(i * 7 % 5));
        // One of up to twelve goes: before its answer, in the middle of it, or behind its end.
        if clients.len() > 3 + i as usize * 5 % 9 {
            drop(clients.swap_remove(i as usize * 31 % clients.len()));
        }
    }
    drop(clients);
    server.wait_until_idle();
    assert_eq!(server.figure("kv_cache_usage_perc"), 0.0);
    let answer = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
    assert_eq!(answer["usage"]["completion_tokens"], 2);
}

#[test]
fn sigterm_lets_what_is_under_way_end_and_the_program_ends_well() {
    let work = with_model();
    let mut server = Server::start(&work, &[]);
    let body = json!({"prompt": "Line", "max_tokens": 200, "stream": true, "ignore_eos": true});
    let mut streams: Vec<_> = (0..3).map(|_| server.send("/v1/completions", &body)).collect();
    // The first answer has started.
    let mut first = [0; 64];
    streams.iter_mut().for_each(|stream| stream.read_exact(&mut first).expect("a head"));
    server.signal("TERM");
    for stream in streams {
        let mut rest = String::new();
        BufReader::new(stream).read_to_string(&mut rest).expect("the rest");
        assert!(rest.contains("data: [DONE]") && rest.contains("\"length\""), "{rest}");
    }
    assert_eq!(server.child.wait().expect("ended").code(), Some(0));
}

#[test]
fn sigterm_at_any_time_truncates_no_stream() {
    let work = with_model();
    for round in 0_u64..if is_full() { 100 } else { 8 } {
        let mut server = Server::start(&work, &[]);
        let body = json!({"prompt": "Line", "max_tokens": 60, "stream": true, "ignore_eos": true});
        let mut streams: Vec<_> = (0..4).map(|_| server.send("/v1/completions", &body)).collect();
        // Some have begun, others wait or are not read yet.
        streams[0].read_exact(&mut [0; 64]).expect("a head");
        std::thread::sleep(Duration::from_millis(round * 13 % 37));
        server.signal("TERM");
        for (i, mut stream) in streams.into_iter().enumerate() {
            let mut rest = String::new();
            // The connection of a request that nobody read yet may be cut, with nothing of an answer.
            let is_read = stream.read_to_string(&mut rest).is_ok();
            let is_whole = rest.contains("\"length\"") && rest.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n");
            let had_not_begun = i > 0 && (rest.is_empty() || rest.starts_with("HTTP/1.1 503"));
            assert!((is_read && is_whole) || had_not_begun, "round {round}, stream {i}: {rest:?}");
        }
        assert_eq!(server.child.wait().expect("ended").code(), Some(0), "round {round}");
    }
}

#[test]
fn a_second_signal_ends_the_program_at_once() {
    let work = with_model();
    let mut server = Server::start(&work, &[]);
    let many = json!({"prompt": vec!["Line"; 60], "max_tokens": 200, "ignore_eos": true});
    let _client = server.send("/v1/completions", &many);
    std::thread::sleep(Duration::from_millis(100));
    server.signal("INT");
    std::thread::sleep(Duration::from_millis(50));
    server.signal("INT");
    assert_eq!(server.child.wait().expect("ended").code(), Some(130));
}

#[test]
fn options_that_cannot_be_are_refused_with_what_would_be_right() {
    let work = Workplace::new();
    work.file("empty.txt", "\n \n");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    refused(&work, &["serve", "run", "--port", &port], &["--port", &port, "choose another"]);
    refused(&work, &["serve", "run", "--port", "0", "--api-key-file", "empty.txt"], &["empty.txt", "one key per line"]);
    refused(&work, &["serve", "run", "--port", "0", "--api-key", "a b"], &["key", "blanks"]);
    refused(&work, &["serve", "run", "--port", "0", "--shutdown-timeout", "nan"], &["--shutdown-timeout", "86400"]);
    refused(&work, &["serve", "run", "--port", "0", "--request-timeout=-1"], &["--request-timeout"]);
    refused(&work, &["serve", "run", "--port", "0", "--metrics-prefix", "a b"], &["--metrics-prefix", "letters"]);
    refused(&work, &["serve", "nowhere", "--port", "0"], &["nowhere"]);
    assert_success(&work.train("run", 2, &[]));
    for (option, value) in
        [("--max-running", "0"), ("--max-running", "600"), ("--block-len", "0"), ("--kv-memory", "-1")]
    {
        refused(&work, &["serve", "run", "--port", "0", &format!("{option}={value}")], &[option, value]);
    }
}

#[test]
fn each_request_is_a_line_of_json_in_the_log() {
    let work = with_model();
    let mut command = work.command(&["serve", "run", "--port", "0", "--log-format", "json", "--verbose"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("standard output")).read_line(&mut line).expect("a line");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next()).expect("an address").to_owned();
    let stderr = child.stderr.take().expect("standard error");
    let server = Server { child, address };
    let id = server.post("/v1/completions", &json!({"prompt": "Line\n", "max_tokens": 2}))["id"].clone();
    server.get("/health");
    server.signal("TERM");
    let lines = BufReader::new(stderr).lines().map_while(Result::ok);
    let lines: Vec<Value> =
        lines.map(|line| serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"))).collect();
    let about =
        |message: &str, key: &str| lines.iter().find(|line| line["message"] == message).map(|line| line[key].clone());
    assert_eq!((about("begun", "id"), about("answered", "id")), (Some(id.clone()), Some(id)));
    assert_eq!(
        (about("answered", "completion_tokens"), about("request", "status")),
        (Some(json!(2)), Some(json!(200)))
    );
    assert_eq!(about("begun", "request"), about("request", "request"));
    assert!(lines.iter().all(|line| line["time"].is_number() && line["level"] == "info"), "{lines:?}");
}
