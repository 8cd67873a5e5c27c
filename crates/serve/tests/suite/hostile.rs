//! Actions of malicious clients: none of them grows anything without bounds.

use afresh_serve::GuestConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::{TEST_TIMEOUT, built, client, config, get, keeper, run, scratch, serve, write};
use crate::sandbox::{Client, sandboxes, with};
use reqwest::Method;
use serde_json::json;

/// A module whose every answer is 32 MiB.
const LARGE: &str = r#"(module
    (memory (export "memory") 520)
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 0))
    (func (export "handle") (param i32) (result i64) (i64.const 0x2000000)))"#;

#[test]
fn an_answer_that_its_client_does_not_take_is_counted_while_it_is_kept() {
    let dir = scratch();
    run(async {
        let guest = GuestConfig::new(write(dir.path(), "large.wasm", LARGE));
        let mut config = config([guest]);
        config.max_buffered_bytes = 40 << 20;
        let server = serve(config).await;
        let (client, url) = (client(), server.url("/"));
        assert_eq!(get(&client, &url).await.1.len(), 32 << 20);
        let mut slow = TcpStream::connect(server.addr).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await.unwrap();
        let mut begun = [0; 15];
        slow.read_exact(&mut begun).await.unwrap();
        assert_eq!(&begun, b"HTTP/1.1 200 OK");
        // Another does not fit.
        for _ in 0..3 {
            assert_eq!(get(&client, &url).await.0, 503);
        }
        drop(slow);
        let room = async { while get(&client, &url).await.0 != 200 {} };
        tokio::time::timeout(TEST_TIMEOUT, room).await.expect("it is given up with its client");
        server.end().await;
    });
}

#[test]
fn connections_of_one_address_beyond_its_limit_take_no_places_of_others() {
    let dir = scratch();
    run(async {
        let mut config = config([keeper(dir.path())]);
        config.max_concurrent_connections = 4;
        config.max_connections_per_address = Some(2);
        config.head_timeout = TEST_TIMEOUT * 4;
        let server = serve(config).await;
        let mut idle = Vec::new();
        for _ in 0..100 {
            idle.push(TcpStream::connect(server.addr).await.unwrap());
        }
        let other = reqwest::Client::builder().no_proxy().timeout(TEST_TIMEOUT);
        let other = other.local_address(std::net::IpAddr::from([127, 0, 0, 9])).build().unwrap();
        assert_eq!(get(&other, &server.url("/healthz")).await.0, 200);
        // Those beyond the limit are closed without a request, and answered with one.
        let mut closed = [0];
        for stream in &mut idle[2..] {
            let read = tokio::time::timeout(TEST_TIMEOUT, stream.read(&mut closed));
            assert!(matches!(read.await.expect("it is closed"), Ok(0) | Err(_)));
        }
        let answer = crate::common::raw(server.addr, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
        assert!(answer.contains("max-connections-per-address"), "{answer}");
        drop(idle);
        server.end().await;
    });
}

/// A client of E2B learns that this server lacks a part of its API, not that its volume is unknown.
#[test]
fn parts_of_the_api_that_are_not_served_are_named() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(with(sandboxes(dir.path(), &script))).await;
        let client = Client::of(&server);
        for (path, name) in
            [("/volumes", "volumes"), ("/volumes/v/file", "volumes"), ("/secrets/s", "secrets")]
        {
            let (status, answer) = client.ask(Method::POST, path, json!({})).await;
            let message = answer["message"].as_str().unwrap_or_default();
            assert!(status == 501 && message.contains(name), "{path}: {status} {answer}");
            // Without a key it may be a route of a guest.
            assert_eq!(get(&client.http, &server.url(path)).await.0, 404);
        }
        let stranger = Client::with_key(&server, "unknown");
        assert_eq!(stranger.ask(Method::GET, "/volumes", json!({})).await.0, 401);
        server.end().await;
    });
}
