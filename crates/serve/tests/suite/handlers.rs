//! Components that answer HTTP themselves: ours, and those that the tools of other languages build.

use std::time::Duration;

use afresh_serve::{GuestConfig, Handler};

use crate::common::{TEST_TIMEOUT, built, built_by, client, config, get, post, raw, run, serve};

/// Output of the JavaScript and Python tools is served as it is, called without a server, and
/// verified.
#[test]
fn handlers_of_other_languages_start_from_the_state_of_their_tools() {
    for (name, expected) in [
        ("js-http.wasm", r#"{"served":1,"things":20000,"found":4,"before":null}"#),
        ("py-http.wasm", r#"{"served": 1, "things": 20000, "found": 4, "before": null}"#),
    ] {
        let Some(file) = built_by(name, "registry-guests") else { continue };
        run(async {
            // Compiling one takes most of a minute.
            let cache = env!("CARGO_TARGET_TMPDIR");
            let mut guest = GuestConfig::new(file.clone());
            guest.open = guest.open.cache(cache);
            let server = serve(config([guest])).await;
            let client = client();
            let url = server.url("/?under=10");
            for canary in 0..5 {
                assert_eq!(get(&client, &url).await, (200, expected.to_owned()));
                let (status, planted) = post(&client, &url, format!("canary-{canary}")).await;
                assert!(status == 200 && planted.contains("20001"), "{planted}");
            }
            server.end().await;
            let wasm = Handler::options(afresh::wasm::GuestOptions::default());
            let options = afresh::Options::new().cache(cache).wasm(wasm);
            let opened = tokio::task::spawn_blocking(move || afresh::open(file, &options));
            let guest = opened.await.unwrap().unwrap();
            let handler = Handler::of(&guest, TEST_TIMEOUT, 1 << 20).await.unwrap().unwrap();
            let found = handler.verify("/", Some(b"canary"), 5, &mut |_| {}).await.unwrap();
            assert!(found.is_pristine() && found.proves_nothing().is_none(), "{found:?}");
            assert!(found.answers_differ == 0 && found.most_bytes_changed > Some(0), "{found:?}");
            let reply = handler.request("/?under=10", None).await.unwrap();
            assert_eq!((reply.status, &reply.body[..]), (200, expected.as_bytes()));
        });
    }
}

#[test]
fn each_http_request_of_a_component_gets_a_new_instance() {
    let Some(file) = built("http.wasm") else { return };
    run(async {
        let mut guest = GuestConfig::new(file);
        guest.timeout = Duration::from_secs(6);
        guest.max_body = 100_000;
        let server = serve(config([guest])).await;
        let client = client();
        let (hello, visit) = (server.url("/hello"), server.url("/visit"));
        assert_eq!(get(&client, &hello).await, (200, "hello\n".to_owned()));
        for canary in 0..20 {
            let found = get(&client, &format!("{visit}?canary-{canary}")).await;
            assert_eq!(found, (200, "served 1 traces []\n".to_owned()));
        }
        let body = "0123456789".repeat(5000);
        assert_eq!(post(&client, &server.url("/echo"), body.clone()).await, (200, body));
        let lines = get(&client, &server.url("/stream?500")).await.1;
        assert_eq!(lines.lines().count(), 500);
        assert_eq!(get(&client, &server.url("/wait?20")).await, (200, "waited\n".to_owned()));
        assert_eq!(get(&client, &server.url("/late?50")).await, (200, "early\n".to_owned()));
        assert_eq!(get(&client, &server.url("/nothing")).await.0, 404);
        let (status, asked) = get(&client, &server.url("/ask")).await;
        assert_eq!((status, asked.trim()), (502, "ErrorCode::HttpRequestDenied"), "{asked}");
        for (path, status) in
            [("/trap", 500), ("/silent", 500), ("/spin", 504), ("/wait?60000", 504)]
        {
            assert_eq!(get(&client, &server.url(path)).await.0, status, "{path}");
            assert_eq!(get(&client, &hello).await, (200, "hello\n".to_owned()));
        }
        // An answer that has begun breaks off where the guest fails: its client must not take it
        // for complete.
        for path in ["/broken", "/broken?1"] {
            let request = format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
            let said = raw(server.addr, request.as_bytes()).await;
            assert!(!said.ends_with("0\r\n\r\n"), "{said}");
            // A guest that fails at once may do so before its answer began: then that is the
            // answer.
            let whole = match client.get(server.url(path)).send().await {
                Ok(response) => response.status() == 200 && response.bytes().await.is_ok(),
                Err(_) => false,
            };
            assert!(!whole, "{path}");
        }
        let metrics = get(&client, &server.url("/metrics")).await.1;
        // A client retries if a reused connection breaks off at once.
        for (kind, least) in [("guest", 4), ("timeout", 4)] {
            let named = format!("kind=\"{kind}\"}} ");
            let count = metrics.split(&named).nth(1).and_then(|rest| rest.lines().next());
            let count = count.and_then(|count| count.parse::<u32>().ok());
            assert!(count >= Some(least), "{kind}: {metrics}");
        }
        assert_eq!(post(&client, &server.url("/echo"), vec![b'x'; 100_001]).await.0, 413);
        // Without a length the answer has begun before it is known to be too much, and breaks off.
        let mut pieces =
            b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for _ in 0..30 {
            pieces.extend(b"1388\r\n");
            pieces.extend([b'x'; 5000]);
            pieces.extend(b"\r\n");
        }
        let said = raw(server.addr, &pieces).await;
        assert!(!said.ends_with("0\r\n\r\n"), "{} bytes", said.len());
        assert_eq!(get(&client, &hello).await, (200, "hello\n".to_owned()));
        server.end().await;
    });
}
