//! A server and a gateway with a certificate, and a client that checks it.

use std::io::{BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use moeworks_serve::gateway::{Endpoint, GatewayOptions, serve};
use moeworks_serve::server::{ServerOptions, StopSignal};
use moeworks_serve::tls::{ClientTls, ServerTls, TlsError, certificates, private_key};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;

use crate::http::{Answer, Setup, TestServer, post};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

fn server_tls() -> ServerTls {
    let chain = certificates(&fixture("server.pem")).unwrap();
    ServerTls::new(chain, private_key(&fixture("server.key")).unwrap()).unwrap()
}

fn server() -> TestServer {
    let options = ServerOptions {
        max_running: 16,
        max_waiting: 16,
        num_blocks: 256,
        tls: Some(server_tls()),
        head_timeout: Duration::from_secs(2),
        ..ServerOptions::default()
    };
    TestServer::start(Setup { options, ..Setup::default() })
}

/// Asks by TLS, with the certificates of `trusted`.
fn ask(address: SocketAddr, trusted: &str, request: &str) -> std::io::Result<Answer> {
    let mut roots = RootCertStore::empty();
    certificates(&fixture(trusted)).unwrap().into_iter().for_each(|one| roots.add(one).unwrap());
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config.with_no_client_auth()), name).unwrap();
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut stream = StreamOwned::new(connection, socket);
    stream.write_all(request.as_bytes())?;
    Ok(Answer::read(&mut BufReader::new(stream)))
}

fn completion(stream: bool) -> String {
    post("/v1/completions", "", &json!({"prompt": "x", "max_tokens": 5, "stream": stream}).to_string())
}

#[test]
fn answers_and_streams_come_by_tls_to_clients_that_trust_the_authority() {
    let server = server();
    let answer = ask(server.address, "ca.pem", &completion(false)).unwrap();
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!("abcde")));
    let events = ask(server.address, "ca.pem", &completion(true)).unwrap().events();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "abcde");
}

#[test]
fn plain_http_and_silence_on_a_connection_are_ended() {
    let server = server();
    for bytes in ["GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", ""] {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
        let mut found = Vec::new();
        let _ = std::io::Read::read_to_end(&mut stream, &mut found);
        assert!(!found.starts_with(b"HTTP"), "{found:?}");
    }
}

/// Starts a gateway to a server; asks it and stops it.
fn by_gateway(server: SocketAddr, trusted: &str) -> Answer {
    let replica = Endpoint { authority: format!("localhost:{}", server.port()), is_tls: true };
    let options = GatewayOptions {
        replicas: vec![replica],
        tls: Some(server_tls()),
        replica_tls: Some(ClientTls::new(certificates(&fixture(trusted)).unwrap()).unwrap()),
        ..GatewayOptions::default()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, stop) = (listener.local_addr().unwrap(), StopSignal::default());
    let told = stop.clone();
    let thread = std::thread::spawn(move || serve(listener, options, &told));
    let answer = ask(address, "ca.pem", &completion(false)).unwrap();
    stop.stop();
    thread.join().unwrap().unwrap();
    answer
}

#[test]
fn a_gateway_speaks_tls_on_both_sides_and_asks_no_server_that_it_does_not_trust() {
    let server = server();
    assert_eq!(by_gateway(server.address, "ca.pem").status, 200);
    // The server's certificate did not sign itself: who trusts it alone does not trust the server.
    assert_eq!(by_gateway(server.address, "server.pem").status, 503);
}

#[test]
fn files_that_cannot_be_used_say_why() {
    let read = |name: &str| certificates(&fixture(name)).err().map(|error| error.to_string());
    assert!(read("none.pem").unwrap().contains("No such file"));
    assert!(read("server.key").unwrap().contains("BEGIN CERTIFICATE"));
    assert!(read("").unwrap().contains("must be a file"));
    assert!(matches!(private_key(&fixture("server.pem")), Err(TlsError::NoKey)));
    let other = private_key(&fixture("other.key")).unwrap();
    assert!(ServerTls::new(certificates(&fixture("server.pem")).unwrap(), other).is_err());
}
