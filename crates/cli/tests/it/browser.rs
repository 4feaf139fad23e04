//! A headless Chromium, driven over pipes (Chrome's DevTools protocol).

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::program::Workplace;

/// A browser with one page. It is ended with the test.
pub(crate) struct Browser {
    child: Child,
    commands: File,
    messages: BufReader<File>,
    session: Option<String>,
    next_id: u64,
    /// Errors of scripts and of the page's policy.
    pub(crate) errors: Vec<String>,
}

/// The browser's program: `MOEWORKS_BROWSER`, or one that is installed. Without one says so and returns none.
fn program_or_skip() -> Option<String> {
    let usual = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"].map(str::to_owned);
    let given = std::env::var("MOEWORKS_BROWSER").ok().into_iter().chain(usual);
    let works =
        |name: &String| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    let found = given.into_iter().find(works);
    if found.is_none() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: the server's page: there is no Chromium (MOEWORKS_BROWSER)");
    }
    found
}

impl Browser {
    /// Starts a browser whose files lie in `work`; none if there is none.
    pub(crate) fn start(work: &Workplace) -> Option<Self> {
        let program = program_or_skip()?;
        let status = Command::new("mkfifo").args([work.path("commands"), work.path("messages")]).status();
        assert!(status.expect("mkfifo runs").success());
        let profile = work.path("profile");
        fs::create_dir(&profile).expect("made");
        let options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking";
        let script = format!(
            "exec \"$0\" {options} --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<commands 4>messages"
        );
        let child = Command::new("sh")
            .args(["-c", &script, &program])
            .arg(&profile)
            .current_dir(work.path("."))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        // Each waits for the other end, in the order in which the shell opens them.
        let commands = OpenOptions::new().write(true).open(work.path("commands")).expect("opened");
        let messages = BufReader::new(File::open(work.path("messages")).expect("opened"));
        let mut browser = Self { child, commands, messages, session: None, next_id: 0, errors: Vec::new() };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable", "Network.enable"] {
            browser.call(domain, json!({}));
        }
        Some(browser)
    }

    /// Calls a method of the protocol and returns its result.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        self.next_id += 1;
        let id = self.next_id;
        let mut command = json!({"id": id, "method": method, "params": params});
        if let Some(session) = &self.session {
            command["sessionId"] = session.as_str().into();
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).expect("sent");
        loop {
            let message = self.next_message();
            if message["id"] == id {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }

    fn next_message(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.messages.read_until(0, &mut bytes).expect("read");
        bytes.pop();
        let message: Value = serde_json::from_slice(&bytes).expect("a message of the browser");
        let entry = &message["params"]["entry"];
        // A request that is refused is no error of the page.
        let is_error = entry["level"] == "error" && entry["source"] != "network";
        if message["method"] == "Runtime.exceptionThrown" || is_error {
            self.errors.push(message["params"].to_string());
        }
        message
    }

    pub(crate) fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'");
    }

    /// The value of an expression in the page; a promise is waited for.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", params);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub(crate) fn wait_until(&mut self, expression: &str) {
        let start = Instant::now();
        while self.value(&format!("Boolean({expression})")) != true {
            assert!(start.elapsed() < Duration::from_secs(60), "never: {expression}\n{:?}", self.errors);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes the page as large as a screen of this size.
    pub(crate) fn resize(&mut self, width: u32, height: u32) {
        let params = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", params);
    }

    /// Writes a picture of the page to the folder that `MOEWORKS_SCREENSHOTS` names, if it is set.
    pub(crate) fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("MOEWORKS_SCREENSHOTS") else { return };
        let data = self.call("Page.captureScreenshot", json!({}))["data"].clone();
        let path = std::path::Path::new(&folder).join(format!("{name}.png.base64"));
        fs::write(path, data.as_str().expect("base64")).expect("written");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
