//! The page of the server in a real browser.
#![cfg(unix)]

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::program::Workplace;
use crate::serve::{Server, with_model};

const KEY: &str = "Bearer secret";

/// A server with a key and a template, and a browser that shows its page; none where there is no browser.
fn shown(work: &Workplace) -> Option<(Server, Browser)> {
    let mut browser = Browser::start(work)?;
    work.file("chat.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}");
    let args = ["--api-key", "secret", "--chat-template", "chat.jinja", "--batch-invariant"];
    let server = Server::start(work, &args);
    browser.resize(1280, 800);
    browser.open(&format!("http://{}/", server.address));
    Some((server, browser))
}

fn set(browser: &mut Browser, id: &str, value: &str) {
    let value = Value::from(value);
    browser.value(&format!("$('{id}').value = {value}, $('{id}').dispatchEvent(new Event('change')), 1"));
}

fn give_key(browser: &mut Browser) {
    browser.wait_until("$('settings').open && $('hint').textContent.includes('API key')");
    set(browser, "key", "secret");
    browser.wait_until("$('model').textContent === 'run' && state.layers.length === 2");
}

/// Sends a message as a user does, and waits for the answer.
fn ask(browser: &mut Browser, text: &str) {
    let text = Value::from(text);
    browser.value(&format!("$('input').value = {text}, $('send').click(), 1"));
    browser.wait_until("!$('send').disabled");
}

#[test]
fn the_page_shows_an_answer_its_experts_and_their_load() {
    let work = with_model();
    let Some((server, mut browser)) = shown(&work) else { return };
    give_key(&mut browser);
    for (id, value) in [("temperature", "0"), ("max_tokens", "24")] {
        set(&mut browser, id, value);
    }
    ask(&mut browser, "Line 3 of a");
    let body = json!({"messages": [{"role": "user", "content": "Line 3 of a"}], "temperature": 0, "max_tokens": 24});
    let expected = server.post_as(KEY, "/v1/chat/completions", &body);
    let message = "document.querySelector('.message.assistant')";
    let text = browser.value(&format!("{message}.firstChild.textContent"));
    assert_eq!(text, expected["choices"][0]["message"]["content"]);
    let note = browser.value(&format!("{message}.querySelector('.note').textContent"));
    let count = expected["usage"]["completion_tokens"].as_u64().expect("a number");
    assert!(note.as_str().expect("a text").contains(&format!("{count} tokens")), "{note}");
    // All tokens but the last were passed, and each has an expert of layer 0 and another colour for another expert.
    let coloured = browser.value(&format!("{message}.querySelectorAll('.token[data-expert]').length"));
    assert_eq!(coloured.as_u64(), Some(count - 1));
    let same = "[...document.querySelectorAll('.token[data-expert]')].every((one) => one.dataset.expert == one.closest('.message').view.routes[one.dataset.index][0])";
    assert_eq!(browser.value(same), true);
    let colours = "new Set([...document.querySelectorAll('.token[data-expert]')].map((one) => getComputedStyle(one).backgroundColor + one.dataset.expert))";
    let experts = "new Set([...document.querySelectorAll('.token[data-expert]')].map((one) => one.dataset.expert))";
    assert_eq!(browser.value(&format!("{colours}.size === {experts}.size && {experts}.size > 0")), true);
    browser.wait_until("$('balance').textContent.includes('(1 is even)')");
    set(&mut browser, "window", "0");
    let cells = "[$('map').width >= 16, $('map').height >= 12, windowLoad().flat().reduce((a, b) => a + b, 0)]";
    let passed = browser.value(cells);
    assert_eq!((&passed[0], &passed[1]), (&json!(true), &json!(true)));
    assert!(passed[2].as_u64().expect("a number") >= (count - 1) * 4, "{passed}");
    browser.picture("light");
    browser.value("$('theme').click(), 1");
    browser.picture("dark");
    let requested =
        browser.value("performance.getEntriesByType('resource').every((one) => one.name.startsWith(location.origin))");
    assert_eq!(requested, true);
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
fn an_answer_can_be_stopped_and_the_conversation_goes_on() {
    let work = with_model();
    let Some((server, mut browser)) = shown(&work) else { return };
    give_key(&mut browser);
    set(&mut browser, "max_tokens", "200");
    // The answer comes slower than it is made.
    let slow = json!({"offline": false, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1});
    browser.call("Network.emulateNetworkConditions", slow);
    browser.value("$('input').value = 'Line', $('send').click(), 1");
    browser.wait_until("document.querySelectorAll('.token').length > 3");
    browser.value("$('stop').click(), 1");
    browser.wait_until("!$('send').disabled");
    let note = browser.value("document.querySelector('.message.assistant .note').textContent");
    assert!(note.as_str().expect("a text").ends_with("stopped"), "{note}");
    let fast = json!({"offline": false, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1});
    browser.call("Network.emulateNetworkConditions", fast);
    set(&mut browser, "max_tokens", "3");
    ask(&mut browser, "And now?");
    assert_eq!(browser.value("state.messages.map((one) => one.role).join()"), "user,assistant,user,assistant");
    // A message with markup stays text, and a failure is said.
    set(&mut browser, "max_tokens", "100000");
    ask(&mut browser, "<img src=x onerror=alert(1)>");
    assert_eq!(browser.value("document.querySelectorAll('#log img').length"), 0);
    let error = browser.value("document.querySelector('.message.error .note').textContent");
    assert!(error.as_str().expect("a text").contains("the context is 256 tokens"), "{error}");
    drop(server);
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
fn the_page_fits_on_a_phone() {
    let work = with_model();
    let Some((_server, mut browser)) = shown(&work) else { return };
    browser.resize(390, 844);
    give_key(&mut browser);
    set(&mut browser, "max_tokens", "40");
    ask(&mut browser, "Line 3 of a text that is easy to learn");
    browser.value("$('settings').open = false");
    browser.picture("phone");
    assert_eq!(browser.value("document.documentElement.scrollWidth <= 390"), true);
    let touched = "[...document.querySelectorAll('form button')].filter((one) => !one.hidden).every((one) => one.getBoundingClientRect().height >= 40)";
    assert_eq!(browser.value(touched), true);
}
