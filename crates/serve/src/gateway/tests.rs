//! Tests of the parts of a gateway that decide.

use super::affinity::Key;
use super::replicas::{Endpoint, EndpointError, Load, choose};
use super::sse::WholeEvents;

fn loads(counts: &[usize]) -> Vec<Load> {
    counts.iter().enumerate().map(|(index, &num_requests)| Load { index, num_requests }).collect()
}

fn key(body: &serde_json::Value) -> Option<Key> {
    Key::of_body(body.to_string().as_bytes(), 64)
}

#[test]
fn a_request_goes_to_its_replica_unless_that_one_has_much_more_than_others() {
    assert_eq!(choose(&loads(&[0, 0]), &[1, 0]), Some((1, true)));
    assert_eq!(choose(&loads(&[0, 3]), &[1, 0]), Some((1, true)));
    assert_eq!(choose(&loads(&[0, 4]), &[1, 0]), Some((0, false)));
    // 1.25 times the mean of 21 requests, rounded up.
    assert_eq!(choose(&loads(&[7, 13]), &[1, 0]), Some((1, true)));
    assert_eq!(choose(&loads(&[6, 14]), &[1, 0]), Some((0, false)));
    assert_eq!(choose(&loads(&[3, 2, 2]), &[]), Some((1, false)));
    assert_eq!(choose(&[], &[0]), None);
    // A replica that is gone is no candidate.
    assert_eq!(choose(&loads(&[0, 0])[..1], &[1, 0]), Some((0, false)));
}

#[test]
fn requests_that_begin_alike_have_the_same_key() {
    let chat = |messages| key(&serde_json::json!({"messages": messages}));
    let question = serde_json::json!({"role": "user", "content": "hello"});
    let first = chat(serde_json::json!([{"role": "system", "content": "s"}, question]));
    let later = chat(
        serde_json::json!([{"role": "system", "content": "s"}, question, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]),
    );
    assert!(first.is_some() && first == later);
    assert_ne!(first, chat(serde_json::json!([question])));
    let prompt = |text: &str| key(&serde_json::json!({"prompt": text}));
    assert_eq!(prompt(&"a".repeat(64)), prompt(&("a".repeat(64) + "other")));
    assert_ne!(prompt("a"), prompt("b"));
    assert_eq!(key(&serde_json::json!({"prompt": ["a", "b"]})), prompt("a"));
    assert_ne!(key(&serde_json::json!({"prompt": "a", "cache_salt": "x"})), prompt("a"));
    // A cut in the middle of a character is before it.
    assert_eq!(prompt(&("a".repeat(63) + "é")), prompt(&"a".repeat(63)));
    assert!(key(&serde_json::json!({"prompt": [1, 2]})).is_some());
    for none in [
        serde_json::json!({}),
        serde_json::json!({"prompt": 3}),
        serde_json::json!({"prompt": []}),
        serde_json::json!([]),
    ] {
        assert_eq!(key(&none), None, "{none}");
    }
    assert_eq!(Key::of_body(b"{\"prompt\": \"a\"}", 0), None);
}

#[test]
fn where_a_replica_goes_only_what_it_had_moves() {
    let names = ["a:1", "b:1", "c:1"];
    let keys = (0..300).map(|i| Key::of(&i.to_string()));
    let mut counts = [0; 3];
    for key in keys {
        let ranked = key.ranked(&names);
        counts[ranked[0]] += 1;
        let without = key.ranked(&names[..2]);
        let expected: Vec<usize> = ranked.into_iter().filter(|&index| index < 2).collect();
        assert_eq!(without, expected);
    }
    assert!(counts.iter().all(|&count| count > 60), "{counts:?}");
}

#[test]
fn a_client_sees_whole_events_alone() {
    let mut events = WholeEvents::default();
    assert_eq!(events.push(b"data: 1\n"), b"");
    assert_eq!(events.push(b"\ndata: 2\n\nda"), b"data: 1\n\ndata: 2\n\n");
    assert!(!events.is_done());
    assert_eq!(events.push(b"ta: [DONE]\n\n"), b"data: [DONE]\n\n");
    assert!(events.is_done());
    let long = vec![b'x'; (4 << 20) + 1];
    assert_eq!(WholeEvents::default().push(&long).len(), long.len());
}

#[test]
fn addresses_of_replicas_are_read() {
    let read = |text: &str| text.parse::<Endpoint>().map(|endpoint| endpoint.authority);
    assert_eq!(read("http://10.0.0.2:8000"), Ok("10.0.0.2:8000".to_owned()));
    assert_eq!(read("http://one/"), Ok("one:80".to_owned()));
    assert_eq!(read("http://[::1]:8000"), Ok("[::1]:8000".to_owned()));
    assert_eq!(read("http://[::1]"), Ok("[::1]:80".to_owned()));
    assert_eq!(read("https://one"), Ok("one:443".to_owned()));
    assert_eq!("https://one:8443".parse::<Endpoint>().unwrap().to_string(), "https://one:8443");
    assert_eq!(read("one:8000"), Err(EndpointError::Scheme));
    assert_eq!(read("http://one:8000/v1"), Err(EndpointError::Path));
    for wrong in ["http://", "http://:80", "http://one:0", "http://one:x", "http://o ne"] {
        assert_eq!(read(wrong), Err(EndpointError::Authority), "{wrong}");
    }
}
