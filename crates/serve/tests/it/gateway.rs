//! A gateway before servers that answer with the alphabet, and before some that do worse.

use std::io::{BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moeworks_serve::gateway::{Endpoint, GatewayOptions, serve};
use moeworks_serve::server::StopSignal;
use serde_json::{Value, json};

use crate::http::{Answer, Setup, TestServer, post};

struct TestGateway {
    address: SocketAddr,
    stop: StopSignal,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl TestGateway {
    fn start(replicas: &[SocketAddr], options: GatewayOptions) -> Self {
        let replicas =
            replicas.iter().map(|address| Endpoint { authority: address.to_string(), is_tls: false }).collect();
        let options = GatewayOptions { replicas, check_interval: Duration::from_millis(20), ..options };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), StopSignal::default());
        let told = stop.clone();
        let thread = std::thread::spawn(move || serve(listener, options, &told));
        let gateway = Self { address, stop, thread: Some(thread) };
        let start = Instant::now();
        while gateway.get("/health").status != 200 {
            assert!(start.elapsed() < Duration::from_secs(30), "the gateway does not begin");
        }
        gateway
    }

    fn send(&self, bytes: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let _ = stream.write_all(bytes.as_bytes());
        stream
    }

    fn begin(&self, body: &Value) -> TcpStream {
        self.send(&post("/v1/completions", "", &body.to_string()))
    }

    fn complete(&self, body: &Value) -> Answer {
        read(self.begin(body))
    }

    fn get(&self, path: &str) -> Answer {
        read(self.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")))
    }

    /// The sum of a figure over what its labels name.
    fn figure(&self, name: &str) -> u64 {
        let text = self.get("/metrics").body;
        let lines = text.lines().filter(|line| line.starts_with(&format!("moeworks_gateway_{name}")));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    }

    fn wait_for(&self, name: &str, value: u64) {
        let start = Instant::now();
        while self.figure(name) != value {
            assert!(start.elapsed() < Duration::from_secs(30), "{name} is not {value}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait(mut self) {
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

impl Drop for TestGateway {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read(stream: TcpStream) -> Answer {
    Answer::read(&mut BufReader::new(stream))
}

fn servers<const N: usize>(delay_ms: u64) -> [TestServer; N] {
    std::array::from_fn(|_| TestServer::start(Setup { delay: Duration::from_millis(delay_ms), ..Setup::default() }))
}

fn addresses(servers: &[TestServer]) -> Vec<SocketAddr> {
    servers.iter().map(|server| server.address).collect()
}

/// A server that says it is ready, and answers other requests with bytes after which it closes the connection.
struct Faulty {
    address: SocketAddr,
    num_requests: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
}

impl Faulty {
    fn start(answer: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (num_requests, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, over) = (Arc::clone(&num_requests), Arc::clone(&is_over));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok).take_while(|_| !over.load(Ordering::SeqCst)) {
                let count = Arc::clone(&count);
                std::thread::spawn(move || converse(stream, answer, &count));
            }
        });
        Self { address, num_requests, is_over }
    }
}

fn converse(mut stream: TcpStream, answer: &str, count: &AtomicUsize) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(len @ 1..) = stream.read(&mut bytes) {
        let is_look = bytes[..len].starts_with(b"GET /ready");
        let text = if is_look { "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" } else { answer };
        let _ = stream.write_all(text.as_bytes());
        if !is_look {
            count.fetch_add(1, Ordering::SeqCst);
            return;
        }
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

#[test]
fn answers_pass_through_whole_and_in_streams_with_errors_as_they_are() {
    let servers = servers::<2>(1);
    let gateway = TestGateway::start(&addresses(&servers), GatewayOptions::default());
    let answer = gateway.complete(&json!({"prompt": "x", "max_tokens": 5}));
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!("abcde")));
    let answer = gateway.complete(&json!({"prompt": "x", "max_tokens": 5, "stream": true}));
    assert_eq!(answer.field("content-type"), Some("text/event-stream; charset=utf-8"));
    let text: String = answer.events().iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "abcde");
    let answer = gateway.complete(&json!({"prompt": "x", "max_tokens": -1}));
    assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("max_tokens")));
    assert_eq!(gateway.get("/v1/models").json()["data"][0]["id"], "tiny");
    assert_eq!((gateway.get("/nothing").status, gateway.get("/ready").status), (404, 200));
    let host = gateway.send("GET /v1/models HTTP/1.1\r\nHost: evil.com\r\n\r\n");
    assert_eq!(read(host).status, 403);
    let large = format!("POST /v1/completions HTTP/1.1\r\nHost: a.localhost\r\nContent-Length: {}\r\n\r\n", 11 << 20);
    let stream = gateway.send(&(large + &"x".repeat(11 << 20)));
    assert_eq!(read(stream).status, 413);
}

#[test]
fn requests_that_begin_alike_stay_with_one_replica() {
    let servers = servers::<3>(0);
    let gateway = TestGateway::start(&addresses(&servers), GatewayOptions::default());
    for round in 0..4 {
        for conversation in 0..12 {
            let prompt = format!("conversation {conversation}{}", " and on".repeat(8));
            let body = json!({"prompt": format!("{prompt} {round}"), "max_tokens": 1});
            // What differs comes behind the first bytes.
            let cut = TestGateway::complete(&gateway, &json!({"prompt": &prompt[..20], "max_tokens": 1}));
            assert_eq!((gateway.complete(&body).status, cut.status), (200, 200));
        }
    }
    assert_eq!(gateway.figure("prefix_total{replica=\"other\"}"), 0);
    assert_eq!(gateway.figure("prefix_total{replica=\"preferred\"}"), 96);
    for server in &servers {
        let name = format!("replica_answers_total{{replica=\"http://{}\"}}", server.address);
        assert!(gateway.figure(&name) >= 8, "{name}");
    }
    // Turns of a conversation find what the turns before computed: at most one replica has the prompt.
    let hits = |server: &TestServer| server.counts.lock().unwrap().prefix_hits;
    let before: Vec<u64> = servers.iter().map(hits).collect();
    let body = json!({"prompt": "a prompt of some length ".repeat(4), "max_tokens": 1});
    (0..5).for_each(|_| assert_eq!(gateway.complete(&body).status, 200));
    let found: Vec<u64> = servers.iter().zip(before).map(|(server, before)| hits(server) - before).collect();
    assert_eq!(found.iter().filter(|&&count| count > 0).count(), 1, "{found:?}");
}

#[test]
fn a_replica_with_too_much_under_way_gives_requests_to_others() {
    let servers = servers::<2>(5);
    let gateway = TestGateway::start(&addresses(&servers), GatewayOptions::default());
    let body = json!({"prompt": "all begin alike", "max_tokens": 60, "stream": true});
    let streams: Vec<TcpStream> = (0..16).map(|_| gateway.begin(&body)).collect();
    gateway.wait_for("requests ", 16);
    let counts =
        [0, 1].map(|i| gateway.figure(&format!("replica_requests{{replica=\"http://{}\"}}", servers[i].address)));
    assert!(counts[0] + counts[1] == 16 && counts.iter().all(|&count| count >= 6), "{counts:?}");
    streams.into_iter().for_each(|stream| drop(read(stream).events()));
    gateway.wait_for("requests ", 0);
}

#[test]
fn a_request_whose_answer_has_not_begun_goes_to_another_replica() {
    let [server] = servers::<1>(1);
    let begins = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    let whole = "HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{\"half\":";
    let full = "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}";
    let ends = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}";
    for answer in ["", begins, whole, full, ends] {
        let faulty = Faulty::start(answer);
        let gateway = TestGateway::start(&[faulty.address, server.address], GatewayOptions::default());
        let mut index = 0;
        // Until one was asked that fails.
        while faulty.num_requests.load(Ordering::SeqCst) == 0 {
            gateway.wait_for("replica_up", 2);
            let body = json!({"prompt": format!("prompt {index}"), "max_tokens": 3, "stream": index % 2 == 0});
            let answer = gateway.complete(&body);
            assert_eq!(answer.status, 200, "{answer:?}");
            assert!(!answer.body.contains("error") && !answer.body.contains("half"), "{answer:?}");
            index += 1;
            assert!(index < 200);
        }
    }
}

#[test]
fn a_request_that_ends_replicas_is_not_given_to_all_of_them() {
    let faulty = [(); 4].map(|()| Faulty::start(""));
    let gateway = TestGateway::start(&faulty.each_ref().map(|one| one.address), GatewayOptions::default());
    let answer = gateway.complete(&json!({"prompt": "x"}));
    assert_eq!((answer.status, answer.code().as_str()), (503, "unavailable"));
    assert_eq!(faulty.iter().map(|one| one.num_requests.load(Ordering::SeqCst)).sum::<usize>(), 2);
}

#[test]
fn a_stream_that_breaks_ends_with_an_error_and_without_half_an_event() {
    let chunk = "15\r\ndata: {\"one\": 1}\n\nda\r\n7\r\nta: {\"t\r\n";
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    let answer: &'static str = Box::leak(format!("{head}{chunk}").into_boxed_str());
    let faulty = Faulty::start(answer);
    let gateway = TestGateway::start(&[faulty.address], GatewayOptions::default());
    let events = gateway.complete(&json!({"prompt": "x", "stream": true})).events();
    assert_eq!((events.len(), &events[0]), (2, &json!({"one": 1})));
    assert_eq!(events[1]["error"]["code"], "unavailable");
    assert_eq!(gateway.figure("replica_broken_total"), 1);
    assert_eq!(faulty.num_requests.load(Ordering::SeqCst), 1);
}

#[test]
fn without_a_replica_requests_are_refused_and_one_that_comes_is_found() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gateway = TestGateway::start(&[address], GatewayOptions::default());
    assert_eq!((gateway.get("/health").status, gateway.get("/ready").status), (200, 503));
    let answer = gateway.complete(&json!({"prompt": "x"}));
    assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")));
    assert_eq!(gateway.figure("unanswered_total"), 1);
    let [server] = servers::<1>(1);
    drop(gateway);
    let gateway = TestGateway::start(&[address, server.address], GatewayOptions::default());
    gateway.wait_for("replica_up", 1);
    assert_eq!(gateway.complete(&json!({"prompt": "x"})).status, 200);
    drop(server);
    gateway.wait_for("replica_up", 0);
    assert_eq!(gateway.complete(&json!({"prompt": "x"})).status, 503);
}

#[test]
fn a_gateway_that_is_told_to_end_truncates_no_stream() {
    let servers = servers::<2>(2);
    for round in 0..8 {
        let gateway = TestGateway::start(&addresses(&servers), GatewayOptions::default());
        let body =
            |i: usize| json!({"prompt": format!("prompt {i}"), "max_tokens": 20 + i, "stream": !i.is_multiple_of(3)});
        let streams: Vec<TcpStream> = (0..12).map(|i| gateway.begin(&body(i))).collect();
        gateway.wait_for("requests ", 12);
        std::thread::sleep(Duration::from_millis(round * 6));
        gateway.stop.stop();
        for (i, stream) in streams.into_iter().enumerate() {
            let answer = read(stream);
            assert_eq!(answer.status, 200, "{answer:?}");
            let text: String = match i % 3 {
                0 => answer.json()["choices"][0]["text"].as_str().unwrap().to_owned(),
                _ => answer.events().iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect(),
            };
            assert_eq!(text.len(), 20 + i, "{answer:?}");
        }
        gateway.wait();
    }
}

#[test]
fn streams_that_take_longer_than_a_gateway_waits_end_with_an_error() {
    let [server] = servers::<1>(20);
    let options = GatewayOptions { shutdown_timeout: Duration::from_millis(50), ..GatewayOptions::default() };
    let gateway = TestGateway::start(&[server.address], options);
    let stream = gateway.begin(&json!({"prompt": "x", "max_tokens": 400, "stream": true}));
    gateway.wait_for("replica_answers_total", 1);
    gateway.stop.stop();
    let events = read(stream).events();
    assert_eq!(events.last().unwrap()["error"]["code"], "unavailable");
    gateway.wait();
    // The replica is told that nobody waits.
    server.idle_counts();
}

#[test]
fn more_requests_than_may_be_under_way_are_sent_away_at_once() {
    let [server] = servers::<1>(5);
    let options = GatewayOptions { max_requests: 2, ..GatewayOptions::default() };
    let gateway = TestGateway::start(&[server.address], options);
    let body = json!({"prompt": "x", "max_tokens": 100, "stream": true});
    let streams = [gateway.begin(&body), gateway.begin(&body)];
    gateway.wait_for("requests ", 2);
    let answer = gateway.complete(&body);
    assert_eq!((answer.status, answer.code().as_str()), (429, "queue_full"));
    assert_eq!(gateway.figure("refused_total"), 1);
    streams.into_iter().for_each(|stream| drop(read(stream).events()));
}

/// A server that answers every request with this load of two experts in one layer.
fn with_load(loads: [u64; 2], experts: usize) -> Faulty {
    let per_expert: Vec<u64> = (0..experts).map(|i| loads[i % 2]).collect();
    let layer = json!({"layer": 1, "tokens": loads[0] + loads[1], "tokens_per_expert": per_expert});
    let serving = json!({"running": 1, "waiting": 2, "kv_cache_usage": 0.25, "prompt_tokens": 3,
                         "generation_tokens": 4});
    let body = json!({"model": "m", "top_k": 1, "layers": [layer], "serving": serving}).to_string();
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    Faulty::start(Box::leak(answer.into_boxed_str()))
}

#[test]
fn the_load_of_experts_is_summed_over_replicas_of_the_same_model() {
    let replicas = [with_load([6, 2], 2), with_load([2, 2], 2), with_load([1, 1], 4)];
    let gateway = TestGateway::start(&replicas.each_ref().map(|one| one.address), GatewayOptions::default());
    gateway.wait_for("replica_up", 3);
    let load = gateway.get("/moe/load").json();
    assert_eq!((&load["object"], &load["model"], &load["replicas"]), (&json!("moe.load"), &json!("m"), &json!(2)));
    assert_eq!((&load["num_experts"], &load["top_k"]), (&json!(2), &json!(1)));
    let layer = &load["layers"][0];
    assert_eq!((&layer["layer"], &layer["tokens"]), (&json!(1), &json!(12)));
    assert_eq!((&layer["tokens_per_expert"], &layer["balancedness"]), (&json!([8, 4]), &json!(0.75)));
    let serving = json!({"running": 2, "waiting": 4, "kv_cache_usage": 0.25, "prompt_tokens": 6,
                         "generation_tokens": 8});
    assert_eq!(load["serving"], serving);
}

#[test]
fn the_load_is_that_of_the_replicas_that_are_ready_and_keys_are_theirs_to_check() {
    let [server] = servers::<1>(0);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gateway = TestGateway::start(&[closed, server.address], GatewayOptions::default());
    gateway.wait_for("replica_up", 1);
    assert_eq!(gateway.complete(&json!({"prompt": "x", "max_tokens": 5})).status, 200);
    let load = gateway.get("/moe/load").json();
    assert_eq!((&load["replicas"], &load["serving"]["generation_tokens"]), (&json!(1), &json!(5)));
    let refusal = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}";
    let refusing = Faulty::start(refusal);
    let gateway = TestGateway::start(&[refusing.address], GatewayOptions::default());
    assert_eq!(gateway.get("/moe/load").status, 401);
    let gateway = TestGateway::start(&[closed], GatewayOptions::default());
    assert_eq!(gateway.get("/moe/load").status, 503);
}
