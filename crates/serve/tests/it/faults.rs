//! Bad input over HTTP, clients that go away, a queue that is full, an engine that fails, and the end of the server.

use std::io::{BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use moeworks_serve::server::{ApiKeys, FailureSignal, Loading, ServerOptions};
use serde_json::json;

use crate::fake_engine::{FAILS, LOSES, PANICS};
use crate::http::{Answer, Setup, TestServer, post, read_chunk, read_head};

fn options() -> ServerOptions {
    Setup::default().options
}

/// A server whose turns take a while.
fn slow(millis: u64) -> Setup {
    Setup { delay: Duration::from_millis(millis), ..Setup::default() }
}

#[test]
fn paths_and_methods_that_are_not_there_have_errors_of_the_same_form() {
    let server = TestServer::start(Setup::default());
    let answer = server.get("/v1/nothing\u{1b}");
    assert!(answer.status == 400 || answer.code() == "not_found", "{answer:?}");
    let answer = server.get("/v1/nothing");
    assert_eq!((answer.status, answer.code().as_str()), (404, "not_found"));
    let answer = server.get("/v1/completions");
    assert_eq!((answer.status, answer.code().as_str()), (405, "method_not_allowed"));
    let answer = server.post("/v1/completions", &json!({"prompt": "x", "temperature": -1}));
    assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("temperature")));
}

#[test]
fn h13_large_bodies_and_heads_are_refused() {
    let server =
        TestServer::start(Setup { options: ServerOptions { max_body_bytes: 1000, ..options() }, ..Setup::default() });
    let large = server.post("/v1/completions", &json!({"prompt": "x".repeat(2000)}));
    assert_eq!((large.status, large.code().as_str()), (413, "request_too_large"));
    // A length that nobody sends is not waited for.
    let answer = server.raw("POST /tokenize HTTP/1.1\r\nHost: a.localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n");
    assert_eq!(answer.status, 413);
    let chunks = format!("{:x}\r\n{}\r\n", 600, " ".repeat(600)).repeat(2);
    let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(server.raw(format!("{head}{chunks}0\r\n\r\n")).status, 413);
    let giant = format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(200_000));
    assert_eq!(server.raw(giant).status, 431);
    let many = format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X: y\r\n".repeat(500));
    assert_eq!(server.raw(many).status, 431);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn h13_requests_that_are_no_http_or_badly_cut_do_no_harm() {
    let options = ServerOptions { body_timeout: Duration::from_millis(500), ..options() };
    let server = TestServer::start(Setup { options, ..Setup::default() });
    let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    for bytes in [
        format!("{head}zz\r\n{{}}\r\n0\r\n\r\n"),
        format!("{head}fffffffffffffffff\r\n{{}}\r\n"),
        "\0\0\0\0\r\n\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n".to_owned(),
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello".to_owned(),
    ] {
        assert_eq!(server.raw(&bytes).status, 400, "{bytes:?}");
    }
    // A body that ends early.
    let mut stream = server.connect();
    stream.write_all(post("/tokenize", "", "{}").replace("Length: 2", "Length: 20").as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let answer = Answer::read(&mut BufReader::new(stream));
    assert!(matches!(answer.status, 0 | 400), "{answer:?}");
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn h13_two_requests_at_once_get_two_answers() {
    let server = TestServer::start(Setup::default());
    let request =
        |max_tokens: usize| post("/v1/completions", "", &json!({"prompt": "x", "max_tokens": max_tokens}).to_string());
    let mut stream = server.connect();
    stream.write_all((request(3) + &request(5)).as_bytes()).unwrap();
    let mut stream = BufReader::new(stream);
    for text in ["abc", "abcde"] {
        assert_eq!(Answer::read(&mut stream).json()["choices"][0]["text"], text);
    }
}

#[test]
fn h13_clients_that_send_slowly_are_let_go() {
    let short = Duration::from_millis(300);
    let options = ServerOptions { head_timeout: short, body_timeout: short, ..options() };
    let server = TestServer::start(Setup { options, ..Setup::default() });
    let start = Instant::now();
    // Half of a head, then nothing: the connection is closed, perhaps with a word.
    let mut stream = server.connect();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: loc").unwrap();
    let mut rest = String::new();
    let _ = stream.read_to_string(&mut rest);
    assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 408"), "{rest}");
    // Half of a body, then nothing.
    let answer = server.raw(post("/tokenize", "", "{}").replace("Length: 2", "Length: 20"));
    assert_eq!((answer.status, answer.code().as_str()), (408, "request_timeout"));
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn h14_without_the_key_only_probes_are_answered() {
    let options = ServerOptions { keys: ApiKeys::new(["secret", "other"]), ..options() };
    let server = TestServer::start(Setup { options, ..Setup::default() });
    for path in ["/v1/models", "/metrics", "/version", "/tokenizer_info", "/nothing"] {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.field("www-authenticate")), (401, Some("Bearer")), "{path}");
    }
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let with_key = |key: &str| server.raw(post("/v1/completions", &format!("Authorization: Bearer {key}\r\n"), &body));
    assert_eq!((with_key("secret").status, with_key("secre").status, with_key("secret2").status), (200, 401, 401));
    assert!(!with_key("guessed").body.contains("guess"));
    assert_eq!((server.get("/health").status, server.get("/ready").status), (200, 200));
}

#[test]
fn h15_clients_with_other_keys_or_salts_share_no_keys_and_values() {
    let options = ServerOptions { keys: ApiKeys::new(["one", "two"]), ..options() };
    let server = TestServer::start(Setup { options, ..Setup::default() });
    let hits = |key: &str, more: &str| {
        let body = format!("{{\"prompt\": \"{}\", \"max_tokens\": 1{more}}}", "abcd".repeat(8));
        let answer = server.raw(post("/v1/completions", &format!("Authorization: Bearer {key}\r\n"), &body));
        assert_eq!(answer.status, 200, "{answer:?}");
        server.idle_counts().prefix_hits
    };
    assert_eq!(hits("one", ""), 0);
    assert_eq!(hits("two", ""), 0);
    assert_eq!(hits("one", ", \"cache_salt\": \"s\""), 0);
    assert_eq!(hits("one", ", \"cache_prompt\": false"), 0);
    assert!(hits("one", "") > 0);
}

#[test]
fn h16_other_names_and_pages_of_other_sites_are_refused() {
    let server = TestServer::start(Setup::default());
    let with_host = |host: &str| server.raw(format!("GET /v1/models HTTP/1.1\r\n{host}\r\n"));
    assert_eq!(with_host("Host: evil.com\r\n").code(), "host_not_allowed");
    assert_eq!(with_host("Host: localhost\r\nHost: evil.com\r\n").status, 400);
    assert_eq!(with_host("").status, 400);
    // A form or a script of another site may send text, but not JSON, and sees no answer.
    let simple = post("/v1/completions", "Origin: http://evil.com\r\n", "{}").replace("application/json", "text/plain");
    let answer = server.raw(simple);
    assert_eq!((answer.status, answer.code().as_str()), (415, "unsupported_media_type"));
    let preflight = "OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.com\r\n\
                     Access-Control-Request-Method: POST\r\n\r\n";
    let answer = server.raw(preflight);
    assert_eq!((answer.status, answer.field("access-control-allow-origin")), (405, None));
}

#[test]
fn a_full_queue_is_said_at_once() {
    let mut setup = slow(300);
    (setup.options.max_running, setup.options.max_waiting, setup.limits.max_running) = (2, 1, 2);
    let server = TestServer::start(setup);
    let many = server.post("/v1/completions", &json!({"prompt": "x", "n": 4}));
    assert_eq!((many.status, many.json()["error"]["param"].as_str()), (400, Some("n")));
    let body = json!({"prompt": "x", "max_tokens": 100, "stream": true});
    let streams: Vec<_> = (0..3).map(|_| server.send("/v1/completions", &body)).collect();
    streams.iter().for_each(|stream| drop(read_head(&mut BufReader::new(stream.try_clone().unwrap()))));
    let times = (0..5).map(|_| {
        let start = Instant::now();
        let answer = server.post("/v1/completions", &body);
        assert_eq!((answer.status, answer.code().as_str()), (429, "queue_full"));
        assert_eq!(answer.field("retry-after"), Some("1"));
        start.elapsed()
    });
    // The engine is in the middle of a turn of 300 ms.
    assert!(times.min().unwrap() < Duration::from_millis(50));
}

#[test]
fn clients_that_go_away_leave_no_block_behind() {
    let server = TestServer::start(slow(1));
    let mut clients = Vec::new();
    for i in 0_u64..50 {
        let is_stream = i % 2 == 0;
        let body =
            json!({"prompt": "x".repeat(1 + i as usize % 20), "max_tokens": 400, "stream": is_stream, "n": 1 + i % 2});
        clients.push(server.send("/v1/completions", &body));
        std::thread::sleep(Duration::from_millis(i * 7 % 11));
        if i % 3 > 0 {
            clients.swap_remove((i * 31 % clients.len() as u64) as usize);
        }
    }
    drop(clients);
    let counts = server.idle_counts();
    assert_eq!(counts.free_blocks, 256, "{counts:?}");
    assert!(server.get("/metrics").body.contains("finished_reason=\"abort\"}"));
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).status, 200);
}

#[test]
fn a_quiet_stream_has_comments() {
    let mut setup = slow(200);
    setup.options.ping_interval = Duration::from_millis(50);
    let server = TestServer::start(setup);
    let answer = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2, "stream": true}));
    assert!(answer.body.contains("\n\n: ping\n\n"), "{}", answer.body);
    assert_eq!(answer.events().len(), 2);
}

#[test]
fn a_turn_that_fails_ends_its_requests_with_an_error_and_no_others() {
    let server = TestServer::start(Setup::default());
    let prompt = format!("x{FAILS}");
    let answer = server.post("/v1/completions", &json!({"prompt": prompt}));
    assert_eq!((answer.status, answer.code().as_str()), (500, "internal_error"));
    let events = server.post("/v1/completions", &json!({"prompt": prompt, "stream": true})).events();
    assert_eq!(events[0]["error"]["type"], "server_error");
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x"})).status, 200);
    assert_eq!(server.idle_counts().free_blocks, 256);
}

#[test]
fn an_engine_that_panics_ends_the_server_after_an_error() {
    let server = TestServer::start(Setup::default());
    let answer = server.post("/v1/completions", &json!({"prompt": format!("x{PANICS}")}));
    assert_eq!(answer.status, 500);
    assert!(server.wait().is_err());
}

#[test]
fn a_lost_rank_ends_requests_with_an_error_and_the_server_after_probes_could_see_it() {
    let server = TestServer::start(Setup::default());
    let answer = server.post("/v1/completions", &json!({"prompt": format!("x{LOSES}")}));
    assert_eq!((answer.status, answer.code().as_str()), (503, "unavailable"));
    assert!(answer.body.contains("rank 1 died"), "{}", answer.body);
    for path in ["/health", "/ready"] {
        let answer = server.get(path);
        assert_eq!(answer.status, 503);
        assert!(answer.body.contains("rank 1 died: killed"), "{}", answer.body);
    }
    let error = server.wait().expect("no panic").expect_err("it failed");
    assert_eq!(error.to_string(), "rank 1 died: killed");
}

#[test]
fn an_engine_that_is_stuck_when_a_rank_is_lost_makes_no_client_wait() {
    let failure = FailureSignal::default();
    let options = ServerOptions { failure: failure.clone(), ..options() };
    let server = TestServer::start(Setup { options, delay: Duration::from_secs(3), ..Setup::default() });
    let body = |is_stream: bool| json!({"prompt": "x", "stream": is_stream});
    let [whole, stream] = [false, true].map(|is_stream| server.send("/v1/completions", &body(is_stream)));
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    failure.fail("rank 1 hung");
    failure.fail("and another");
    let answer = Answer::read(&mut BufReader::new(whole));
    assert_eq!((answer.status, answer.code().as_str()), (503, "unavailable"));
    let answer = Answer::read(&mut BufReader::new(stream));
    assert!(answer.body.contains("rank 1 hung"), "{}", answer.body);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(server.wait().expect("no panic").expect_err("it failed").to_string(), "rank 1 hung");
}

#[test]
fn a_server_that_is_told_to_end_finishes_what_is_under_way() {
    let server = TestServer::start(slow(20));
    let stream = server.send("/v1/completions", &json!({"prompt": "x", "max_tokens": 40, "stream": true}));
    let mut stream = BufReader::new(stream);
    read_head(&mut stream);
    server.stop.stop();
    std::thread::sleep(Duration::from_millis(100));
    let ready = server.get("/ready");
    assert_eq!((ready.status, ready.field("retry-after")), (503, Some("1")));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x"})).status, 503);
    let mut text = Vec::new();
    while let Some(chunk) = read_chunk(&mut stream) {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"length\""), "{text}");
    assert!(server.wait().unwrap().is_ok());
}

#[test]
fn requests_that_take_longer_than_the_server_waits_end_with_an_error() {
    let mut setup = slow(20);
    setup.options.shutdown_timeout = Duration::from_millis(200);
    let server = TestServer::start(setup);
    let stream = server.send("/v1/completions", &json!({"prompt": "x", "max_tokens": 500, "stream": true}));
    let mut stream = BufReader::new(stream);
    read_head(&mut stream);
    server.stop.stop();
    let mut text = Vec::new();
    while let Some(chunk) = read_chunk(&mut stream) {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("the server is shutting down") && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(server.wait().unwrap().is_ok());
}

#[test]
fn a_server_that_is_told_to_end_at_any_time_truncates_no_stream() {
    for wait in [0, 3, 10, 30, 60] {
        let server = TestServer::start(slow(2));
        let body = json!({"prompt": "x", "max_tokens": 20, "stream": true});
        let streams: Vec<_> = (0..8).map(|_| server.send("/v1/completions", &body)).collect();
        std::thread::sleep(Duration::from_millis(wait));
        server.stop.stop();
        for stream in streams {
            let answer = Answer::read(&mut BufReader::new(stream));
            // A connection that was not accepted yet, or a request that came too late, got nothing.
            let is_whole = answer.status == 200 && answer.events().len() == 20;
            assert!(is_whole || matches!(answer.status, 0 | 503), "{answer:?}");
        }
        assert!(server.wait().unwrap().is_ok());
    }
}

#[test]
fn a_port_answers_while_the_model_is_loaded_and_no_connection_is_refused_in_between() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let ask = move |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        Answer::read(&mut BufReader::new(stream))
    };
    let loading = Loading::begin(&listener, None).unwrap();
    for path in ["/health", "/ready", "/v1/models"] {
        let answer = ask(path);
        assert_eq!((answer.status, answer.code().as_str()), (503, "loading"), "{path}");
        assert_eq!(answer.field("retry-after"), Some("1"));
    }
    drop(loading);
    // Whoever comes now waits.
    let waiting = std::thread::spawn(move || ask("/health"));
    std::thread::sleep(Duration::from_millis(50));
    let server = TestServer::start_on(listener, Setup::default());
    assert_eq!(waiting.join().unwrap().status, 200);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn an_answer_that_takes_too_long_is_ended() {
    let options = ServerOptions { request_timeout: Some(Duration::from_millis(200)), ..options() };
    let server = TestServer::start(Setup { options, ..slow(20) });
    let body = json!({"prompt": "x", "max_tokens": 400});
    let answer = server.post("/v1/completions", &body);
    assert_eq!((answer.status, answer.code().as_str()), (408, "request_timeout"));
    assert!(answer.body.contains("0.2 seconds"), "{}", answer.body);
    let events = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 400, "stream": true})).events();
    assert_eq!(events.last().unwrap()["error"]["code"], "request_timeout");
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).status, 200);
    assert_eq!(server.idle_counts().free_blocks, 256);
}

#[test]
fn every_answer_has_the_id_of_its_request() {
    let server = TestServer::start(Setup::default());
    let id = |answer: Answer| answer.field("x-request-id").unwrap().to_owned();
    let (first, second) = (id(server.get("/health")), id(server.get("/nothing")));
    assert!(first.starts_with("req-") && second.starts_with("req-") && first != second);
}
