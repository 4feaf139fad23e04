//! `moeworks gateway` before two servers of a small model.
#![cfg(unix)]

use std::io::{BufReader, Read as _};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::program::Workplace;
use crate::serve::{Server, read, with_model};

/// A gateway before servers. It is ended with the test.
fn gateway(work: &Workplace, servers: &[&Server]) -> Server {
    let urls: Vec<String> = servers.iter().map(|server| format!("http://{}", server.address)).collect();
    let mut args = vec!["gateway", "--port", "0", "--check-interval", "0.1", "--to"];
    args.extend(urls.iter().map(String::as_str));
    Server::of(work.command(&args))
}

/// The JSON of the events of a stream, which ends as it should.
fn events(body: &str) -> Vec<Value> {
    let events = body.strip_suffix("data: [DONE]\n\n").unwrap_or_else(|| panic!("cut off: {body:?}"));
    let data = events.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).expect("JSON")).collect()
}

#[test]
fn a_replica_that_is_killed_loses_only_what_it_had_begun_to_answer() {
    let work = with_model();
    let (one, two) = (Server::start(&work, &[]), Server::start(&work, &[]));
    let gateway = gateway(&work, &[&one, &two]);
    let body = |i: usize| {
        let prompt = format!("Line {i}");
        json!({"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stream": !i.is_multiple_of(4)})
    };
    let mut streams: Vec<TcpStream> = (0..32).map(|i| gateway.send("/v1/completions", &body(i))).collect();
    // One has begun.
    streams[1].read_exact(&mut [0; 64]).expect("a head");
    drop(one);
    let mut num_lost = 0;
    for (i, stream) in streams.into_iter().enumerate() {
        if i == 1 {
            // Its head was read.
            let mut rest = String::new();
            BufReader::new(stream).read_to_string(&mut rest).expect("the rest");
            assert!(rest.contains("data: [DONE]"), "{rest}");
            continue;
        }
        let answer = read(stream);
        if i.is_multiple_of(4) {
            let whole: Value = serde_json::from_str(&answer).expect("JSON");
            assert_eq!(whole["usage"]["completion_tokens"], 200, "{answer}");
            continue;
        }
        let events = events(&answer);
        let last = events.last().expect("an event");
        match last.get("error") {
            Some(error) => {
                num_lost += 1;
                assert_eq!(error["code"], "unavailable");
                assert!(events.len() > 1, "it had not begun: {answer}");
            }
            None => assert_eq!(last["choices"][0]["finish_reason"], "length", "{answer}"),
        }
    }
    assert!(num_lost < 31, "one server was left");
    for i in 0..8 {
        let answer = gateway.post("/v1/completions", &body(i * 4));
        assert_eq!(answer["usage"]["completion_tokens"], 200);
    }
}

#[test]
fn sigterm_ends_a_gateway_well_and_truncates_no_stream() {
    let work = with_model();
    let server = Server::start(&work, &[]);
    for round in 0..6 {
        let mut gateway = gateway(&work, &[&server]);
        let body = json!({"prompt": "Line", "max_tokens": 120, "stream": true, "ignore_eos": true});
        let mut streams: Vec<TcpStream> = (0..4).map(|_| gateway.send("/v1/completions", &body)).collect();
        streams.iter_mut().for_each(|stream| stream.read_exact(&mut [0; 64]).expect("a head"));
        std::thread::sleep(std::time::Duration::from_millis(round * 5));
        gateway.signal("TERM");
        for stream in streams {
            let mut rest = String::new();
            BufReader::new(stream).read_to_string(&mut rest).expect("the rest");
            assert!(rest.contains("\"length\"") && rest.contains("data: [DONE]"), "{rest}");
        }
        assert_eq!(gateway.child.wait().expect("ended").code(), Some(0));
    }
}

#[test]
fn addresses_that_cannot_be_are_refused_with_what_would_be_right() {
    let work = Workplace::new();
    refused(&work, &["gateway"], &["--to"]);
    refused(&work, &["gateway", "--to", "https://one"], &["--to https://one", "--tls-ca"]);
    refused(&work, &["gateway", "--to", "http://one:1/v1"], &["--to http://one:1/v1", "port"]);
    refused(&work, &["gateway", "--to", "http://one:1", "http://one:1/"], &["twice"]);
    refused(&work, &["gateway", "--to", "http://one:1", "--answer-timeout", "nan"], &["--answer-timeout", "86400"]);
    refused(&work, &["gateway", "--to", "http://one:1", "--max-requests", "0"], &["--max-requests", "at least 1"]);
}
