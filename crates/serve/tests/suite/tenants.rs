//! Clients, tenants and servers that take nothing from one another.

use std::time::Duration;

use crate::common::{self, Running, TEST_TIMEOUT, built, client, config, get, run, scratch, serve};
use crate::sandbox::{Client, KEY, path, sandboxes, with};
use afresh_serve::{GuestConfig, Keys, Server};
use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[test]
fn bodies_take_memory_when_they_arrive() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut config = with(sandboxes(dir.path(), &script));
        config.max_buffered_bytes = 8 << 20;
        let server = serve(config).await;
        let client = Client::of(&server);
        // Of maximum size, with a length and without, and without any content.
        let mut idle = Vec::new();
        for length in ["Content-Length: 67108864", "Transfer-Encoding: chunked"] {
            for _ in 0..20 {
                let mut stream = TcpStream::connect(server.addr).await.unwrap();
                let head = format!(
                    "POST /sandboxes HTTP/1.1\r\nHost: h\r\nX-API-Key: {KEY}\r\n{length}\r\n\r\n"
                );
                stream.write_all(head.as_bytes()).await.unwrap();
                idle.push(stream);
            }
        }
        let sandbox = client.create().await;
        assert_eq!(client.value(&sandbox, "1 + 1").await, "2");
        // A message counts by its decoded size.
        let labels = json!({"templateID": "script", "metadata": {"a": "x".repeat(900 << 10)}});
        assert_eq!(client.ask(Method::POST, "/sandboxes", labels).await.0, 503);
        drop(idle);
        server.end().await;
    });
}

#[test]
fn stalled_requests_of_one_tenant_leave_memory_to_others() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut config = with(sandboxes(dir.path(), &script));
        config.max_buffered_bytes = 8 << 20;
        let server = serve(config).await;
        // Messages that never end, of 80 KiB each once they are decoded.
        let mut stalled = Vec::new();
        for _ in 0..200 {
            let mut stream = TcpStream::connect(server.addr).await.unwrap();
            let head = format!(
                "POST /sandboxes HTTP/1.1\r\nHost: h\r\nX-API-Key: {KEY}\r\nContent-Length: 9999\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&[b' '; 2 << 10]).await.unwrap();
            stalled.push(stream);
        }
        let client = Client::of(&server);
        let labels = json!({"templateID": "script", "metadata": {"a": "x".repeat(4 << 10)}});
        let full = async {
            while client.ask(Method::POST, "/sandboxes", labels.clone()).await.0 != 503 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, full).await.expect("its share is used up");
        let other = Client::with_key(&server, "key-of-other");
        let (status, made) = other.ask(Method::POST, "/sandboxes", labels).await;
        assert_eq!(status, 201, "{made}");
        assert_eq!(other.value(&made, "1 + 1").await, "2");
        drop(stalled);
        server.end().await;
    });
}

#[test]
fn a_directory_serves_one_server() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let config = with(sandboxes(dir.path(), &script));
        let server = serve(config.clone()).await;
        let refused = Server::bind(config.clone()).await.expect_err("another server has it");
        let why = std::error::Error::source(&refused).unwrap().to_string();
        assert!(why.contains("another server") && why.contains("another directory"), "{why}");
        server.end().await;
        serve(config).await.end().await;
    });
}

#[test]
fn a_reload_renews_the_keys() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let config = with(sandboxes(dir.path(), &script));
        let server = serve(config.clone()).await;
        let mut client = Client::of(&server);
        let sandbox = client.create().await;
        let mut renewed = config.clone();
        renewed.sandboxes.as_mut().unwrap().keys = Keys::new([("acme", "key-renewed")]);
        server.handle.reload(&renewed).await.unwrap();
        for (key, status) in [(KEY, 401), ("key-of-other", 401), ("key-renewed", 200)] {
            client.key = key;
            let asked = client.ask(Method::GET, &path(&sandbox, ""), json!({})).await;
            assert_eq!(asked.0, status, "{key}");
        }
        server.end().await;
    });
}

#[test]
fn a_kill_ends_a_call_that_never_returns_and_frees_its_place() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.max_sandboxes = 1;
        sandboxes.call_timeout = 2 * TEST_TIMEOUT;
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let own = client.create().await;
        let busy = client.begin(&own, "console.log('begun'); while (true);").await;
        let new = json!({"templateID": "script"});
        let (status, why) = client.ask(Method::POST, "/sandboxes", new.clone()).await;
        assert_eq!(status, 429, "{why}");
        assert_eq!(client.ask(Method::DELETE, &path(&own, ""), json!({})).await.0, 204);
        assert!(busy.text().await.is_err(), "the answer breaks off");
        let ended = async {
            while client.ask(Method::POST, "/sandboxes", new.clone()).await.0 != 201 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, ended).await.expect("its call ends");
        server.end().await;
    });
}

#[test]
fn a_call_that_waited_does_not_wake_a_paused_sandbox() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(with(sandboxes(dir.path(), &script))).await;
        let client = Client::of(&server);
        let own = client.create().await;
        let to = path(&own, "/pause");
        // The pause and then the call have to come while another call runs: on a busy machine that
        // takes longer.
        let mut waited = (None, 0);
        for wait in [300, 1200, 4800] {
            let code = format!(
                "console.log('x'); for (let t = Date.now(); Date.now() < t + {};); 1",
                5 * wait
            );
            let begun = client.begin(&own, &code).await;
            let pausing = client.ask(Method::POST, &to, json!({}));
            let waiting = async {
                tokio::time::sleep(Duration::from_millis(wait)).await;
                client.execute(&own, &format!("var woken{wait} = 1")).await
            };
            let ((status, _), after) = tokio::join!(pausing, waiting);
            assert_eq!(status, 204);
            assert!(begun.text().await.unwrap().contains("end_of_execution"));
            waited = (after.err(), wait);
            // 502: it came once the sandbox was paused. Without an error it came before the pause,
            // or woke the sandbox.
            if waited.0 == Some(409) {
                break;
            }
            client.post(&path(&own, "/connect"), json!({"timeout": 600})).await;
        }
        assert_eq!(waited.0, Some(409));
        let metrics = get(&client.http, &server.url("/metrics")).await.1;
        assert!(metrics.contains(r#"afresh_sandboxes{place="saved"} 1"#), "{metrics}");
        client.post(&path(&own, "/connect"), json!({"timeout": 600})).await;
        assert_eq!(client.value(&own, &format!("typeof woken{}", waited.1)).await, "\"undefined\"");
        server.end().await;
    });
}

#[test]
fn names_are_shown_only_at_the_address_of_operations() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut guest = common::keeper(dir.path());
        guest.name = "name-of-a-tenant".to_owned();
        guest.route = "/route-of-a-tenant".to_owned();
        let mut config = with(sandboxes(dir.path(), &script));
        config.guests.push(guest);
        for admin in [None, Some(config.addr)] {
            config.admin = admin;
            let server = serve(config.clone()).await;
            let client = Client::of(&server);
            let own = client.create().await;
            client
                .post(&path(&own, "/checkpoints"), json!({"name": "checkpoint-of-a-tenant"}))
                .await;
            let status = get(&client.http, &server.operations("/status.json")).await.1;
            for name in
                ["name-of-a-tenant", "route-of-a-tenant", "checkpoint-of-a-tenant", "\"script\""]
            {
                assert_eq!(status.contains(name), admin.is_some(), "{name}: {status}");
            }
            let id = own["sandboxID"].as_str().unwrap();
            let pages = format!("/status/pages.json?sandbox={}", &id[id.len() - 6..]);
            let shown = get(&client.http, &server.operations(&pages)).await.0;
            assert_eq!(shown, if admin.is_some() { 200 } else { 404 });
            server.end().await;
        }
    });
}

/// Asks for an echo of a body of `length` bytes, and waits until it has begun.
async fn echo(server: &Running, length: usize) -> TcpStream {
    let mut stream = TcpStream::connect(server.addr).await.unwrap();
    let head = format!("POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\nx");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut first = [0];
    stream.read_exact(&mut first).await.unwrap();
    stream
}

#[test]
fn clients_that_stall_leave_their_places_to_others() {
    const LENGTH: usize = 64 << 20;
    let Some(file) = built("http.wasm") else { return };
    run(async {
        let mut config = config([GuestConfig::new(file)]);
        config.max_concurrent_requests = 2;
        config.guests[0].timeout = TEST_TIMEOUT;
        config.guests[0].max_body = LENGTH;
        let server = serve(config).await;
        // One does not send the body, another does not take the answer.
        let mut sending = echo(&server, 2).await;
        let mut taking = echo(&server, LENGTH).await;
        let body = vec![b'x'; 1 << 20];
        let mut sent = 1;
        while let Ok(written) =
            tokio::time::timeout(Duration::from_secs(1), taking.write(&body)).await
        {
            sent += written.unwrap();
        }
        assert!(sent < LENGTH, "it all fits into the buffers of sockets");
        let (client, url) = (client(), server.url("/hello"));
        for _ in 0..3 {
            let hello = tokio::time::timeout(TEST_TIMEOUT, get(&client, &url)).await;
            assert_eq!(hello.expect("a place is free"), (200, "hello\n".to_owned()));
        }
        // Both continue.
        sending.write_all(b"y").await.unwrap();
        let mut echoed = Vec::new();
        while !echoed.ends_with(b"0\r\n\r\n") {
            assert!(sending.read_buf(&mut echoed).await.unwrap() > 0, "{echoed:?}");
        }
        let mut taken = 0;
        let mut buffer = vec![0; 1 << 16];
        while taken < sent {
            let read = taking.read(&mut buffer).await.unwrap();
            assert!(read > 0, "it broke off after {taken} bytes");
            taken += read;
        }
        drop((taking, sending));
        server.end().await;
    });
}
