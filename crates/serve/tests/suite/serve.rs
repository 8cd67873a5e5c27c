//! Requests are answered from pristine guests, after earlier, slow and hostile ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{
    KEEPER, TEST_TIMEOUT, built, client, config, get, keeper, parrot, post, raw, run, scratch,
    serve, write,
};
use afresh::memory::Strategy;
use afresh::wasm::Mode;
use afresh_sys::Call;
use afresh_sys::inject::{self, Plan};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[test]
fn every_request_is_answered_from_the_warm_state() {
    let dir = scratch();
    run(async {
        for mode in [Mode::Reset, Mode::Fresh] {
            let mut guest = keeper(dir.path());
            guest.wasm.mode = mode;
            let server = serve(config([guest])).await;
            let client = client();
            let mut asking = tokio::task::JoinSet::new();
            for number in 0..8 {
                let (client, url) = (client.clone(), server.url("/any/path"));
                asking.spawn(async move {
                    for request in 0..50 {
                        let canary = format!("canary {number} {request}");
                        assert_eq!(post(&client, &url, canary).await, (200, "warm".to_owned()));
                    }
                });
            }
            while let Some(asked) = asking.join_next().await {
                asked.unwrap();
            }
            server.end().await;
        }
    });
}

#[test]
fn an_instance_answers_several_requests_only_where_that_is_asked_for() {
    let dir = scratch();
    run(async {
        let mut guest = keeper(dir.path());
        guest.max_instance_reuse_count = 3;
        guest.idle_instance_timeout = TEST_TIMEOUT;
        let server = serve(config([guest])).await;
        let (client, url) = (client(), server.url("/"));
        let mut answers = Vec::new();
        for request in 0..7 {
            answers.push(post(&client, &url, format!("request {request}")).await.1);
        }
        let expected = ["warm", "request 0", "request 1", "warm", "request 3", "request 4", "warm"];
        assert_eq!(answers, expected);
        server.end().await;
    });
}

#[test]
fn a_guest_that_traps_hangs_or_grows_is_refused_and_the_next_request_is_answered() {
    let dir = scratch();
    run(async {
        let mut guest = keeper(dir.path());
        guest.timeout = Duration::from_secs(6);
        guest.memory = 4 << 20;
        let server = serve(config([guest])).await;
        let (client, url) = (client(), server.url("/"));
        for _ in 0..2 {
            for (request, status) in [("!trap", 500), ("!spin", 504), ("!grow", 200)] {
                assert_eq!(post(&client, &url, request).await.0, status, "{request}");
                assert_eq!(post(&client, &url, "next").await, (200, "warm".to_owned()));
            }
        }
        // Larger than the guest has room for, and smaller than the route takes.
        assert_eq!(post(&client, &url, vec![b'x'; 70_000]).await.0, 500);
        assert_eq!(post(&client, &url, "next").await, (200, "warm".to_owned()));
        let (status, metrics) = get(&client, &server.url("/metrics")).await;
        assert_eq!(status, 200);
        for line in [
            r#"afresh_requests_total{guest="guest",code="504"} 2"#,
            r#"afresh_failures_total{guest="guest",kind="timeout"} 2"#,
            r#"afresh_failures_total{guest="guest",kind="guest"} 3"#,
        ] {
            assert!(metrics.contains(line), "{line} is not in\n{metrics}");
        }
        server.end().await;
    });
}

/// A number of the metrics: of the line that begins with this.
fn metric(text: &str, line: &str) -> f64 {
    let found = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("{line} is not in\n{text}")).parse().unwrap()
}

#[test]
fn resets_and_the_fate_of_instances_are_counted() {
    let dir = scratch();
    run(async {
        for mode in [Mode::Reset, Mode::Fresh] {
            let mut guest = keeper(dir.path());
            guest.wasm.mode = mode;
            guest.memory = 4 << 20;
            let config = config([guest]);
            let server = serve(config.clone()).await;
            let (client, url) = (client(), server.url("/"));
            let read = async || get(&client, &server.url("/metrics")).await.1;
            let before = read().await;
            let since = |text: &str, line: &str| metric(text, line) - metric(&before, line);
            for _ in 0..20 {
                // The name, the request and the answer are in three pages, and the stack in none.
                post(&client, &url, "x").await;
            }
            for request in ["!grow", "!grow", "!trap"] {
                post(&client, &url, request).await;
            }
            let after = read().await;
            let about = format!(
                r#"afresh_guest_info{{guest="guest",kind="module",mode="{}",strategy="write-set"#,
                mode.name()
            );
            assert!(after.contains(&about), "{about} is not in\n{after}");
            let guest = r#"{guest="guest"}"#;
            assert_eq!(since(&after, &format!("afresh_pool_grown_total{guest}")), 2.0);
            let resets = since(&after, &format!("afresh_reset_pages_count{guest}"));
            let returned = since(&after, &format!("afresh_pool_returned_total{guest}"));
            assert_eq!((resets, returned), (23.0, 23.0));
            let small = since(&after, r#"afresh_reset_pages_bucket{le="4.0",guest="guest"}"#);
            let none = since(&after, r#"afresh_reset_pages_bucket{le="0.0",guest="guest"}"#);
            assert!(small >= 20.0 && none == 0.0, "{small} and {none} in\n{after}");
            let pages = since(&after, &format!("afresh_reset_pages_sum{guest}"));
            // Each growth wrote one page of each that it made.
            assert!(pages >= 60.0 + 2.0 * 61.0, "{pages} in\n{after}");
            let kept = metric(&after, &format!("afresh_pool_resident_bytes{guest}"));
            let process = metric(&after, "afresh_process_resident_bytes");
            assert!(kept >= 3.0 * 4096.0 && process > kept, "{kept} of {process}");
            assert_eq!(metric(&after, &format!("afresh_pool_discarded_total{guest}")), 0.0);
            // The counts continue when the guests are exchanged.
            server.handle.reload(&config).await.unwrap();
            post(&client, &url, "x").await;
            let later = read().await;
            let more = metric(&later, &format!("afresh_pool_returned_total{guest}"));
            assert!(more > metric(&after, &format!("afresh_pool_returned_total{guest}")));
            server.end().await;
        }
    });
}

#[test]
fn an_instance_that_cannot_be_brought_back_is_counted_with_the_reason() {
    let dir = scratch();
    let mut guest = keeper(dir.path());
    guest.wasm.mode = Mode::Reset;
    guest.wasm.strategy = Strategy::Discard;
    // On this thread alone, which the kernel refuses something once.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut config = config([guest]);
    config.admin = Some(config.addr);
    let (server, client) = runtime.block_on(async { (serve(config).await, client()) });
    let url = server.url("/");
    let ask = async || post(&client, &url, "x").await;
    assert_eq!(runtime.block_on(ask()), (200, "warm".to_owned()));
    let plan = Plan { call: Some(Call::Advise), after: 0, times: 1, errno: 12 };
    let (answer, failed) = inject::with(plan, || runtime.block_on(ask()));
    assert_eq!((answer, failed), ((200, "warm".to_owned()), 1));
    runtime.block_on(async {
        assert_eq!(ask().await, (200, "warm".to_owned()));
        let text = get(&client, &server.operations("/metrics")).await.1;
        for line in [
            r#"afresh_pool_quarantined_total{guest="guest",reason="system"}"#,
            r#"afresh_pool_dropped_total{guest="guest",reason="quarantined"}"#,
            r#"afresh_pool_alive{guest="guest"}"#,
        ] {
            assert_eq!(metric(&text, line), 1.0, "{line} in\n{text}");
        }
        assert!(metric(&text, r#"afresh_pool_discarded_total{guest="guest"}"#) >= 2.0, "{text}");
        let status = get(&client, &server.operations("/status.json")).await.1;
        assert!(status.contains("resetting the slot failed"), "{status}");
        server.end().await;
    });
}

#[test]
fn one_guests_flood_does_not_starve_another_and_ends_in_429() {
    let dir = scratch();
    run(async {
        let mut greedy = keeper(dir.path());
        greedy.name = "greedy".to_owned();
        greedy.route = "/greedy".to_owned();
        greedy.timeout = TEST_TIMEOUT;
        greedy.max_concurrent_requests = 2;
        greedy.max_waiting_requests = 4;
        let mut modest = keeper(dir.path());
        modest.name = "modest".to_owned();
        modest.route = "/modest".to_owned();
        let mut config = config([greedy, modest]);
        config.max_concurrent_requests = 4;
        let server = serve(config).await;
        let mut flood = tokio::task::JoinSet::new();
        let client = client();
        for _ in 0..24 {
            let (client, url) = (client.clone(), server.url("/greedy"));
            flood.spawn(async move { post(&client, &url, "!spin").await.0 });
        }
        // Once only running and waiting requests are left, the others have been refused.
        let mut told = Vec::new();
        while told.len() < 24 - 6 {
            told.push(flood.join_next().await.unwrap().unwrap());
        }
        assert_eq!(told, [429; 18]);
        for _ in 0..20 {
            let answer = post(&client, &server.url("/modest"), "one").await;
            assert_eq!(answer, (200, "warm".to_owned()));
        }
        // The flood was still waiting: none of it has been answered.
        assert!(flood.try_join_next().is_none());
        flood.abort_all();
        server.end().await;
    });
}

#[test]
fn oversized_half_and_slow_requests_are_refused() {
    let dir = scratch();
    run(async {
        let mut guest = keeper(dir.path());
        guest.max_body = 1000;
        let mut config = config([guest]);
        config.head_timeout = Duration::from_secs(2);
        config.body_timeout = Duration::from_secs(2);
        let server = serve(config).await;
        let client = client();
        let url = server.url("/");
        assert_eq!(post(&client, &url, vec![b'x'; 1000]).await.0, 200);
        assert_eq!(post(&client, &url, vec![b'x'; 1001]).await.0, 413);
        for (request, answer) in [
            // Says a length that it does not keep.
            ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\nx", "413"),
            // In pieces, without a length.
            ("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n", "408"),
            // Half a body, and then nothing.
            ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf", "408"),
            ("GARBAGE\r\n\r\n", "400"),
        ] {
            let said = raw(server.addr, request.as_bytes()).await;
            let status = said.split(' ').nth(1);
            assert_eq!(status, Some(answer), "{request:?} was answered with {said:?}");
        }
        let mut large =
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n".to_vec();
        large.extend([b'x'; 2000]);
        assert!(raw(server.addr, &large).await.contains(" 413 "));
        let head =
            |length: usize| "GET / HTTP/1.1\r\nHost: h\r\nX: ".to_owned() + &"x".repeat(length);
        let whole = head(15 << 10) + "\r\nConnection: close\r\n\r\n";
        assert!(raw(server.addr, whole.as_bytes()).await.contains(" 200 "));
        for length in [16 << 10, 200_000] {
            assert!(raw(server.addr, head(length).as_bytes()).await.contains(" 431 "));
        }
        // A head that stays incomplete or empty: closed after its time, with 408 or without.
        for half in [&b"GET / HTTP/1.1\r\nHos"[..], b""] {
            let said = raw(server.addr, half).await;
            assert!(said.is_empty() || said.contains(" 408 "), "{said:?}");
        }
        assert_eq!(post(&client, &url, "x").await, (200, "warm".to_owned()));
        server.end().await;
    });
}

#[test]
fn memory_held_by_all_requests_together_is_bounded() {
    let dir = scratch();
    run(async {
        let mut config = config([keeper(dir.path())]);
        config.max_buffered_bytes = 10_000;
        let server = serve(config).await;
        let client = client();
        let (url, head) =
            (server.url("/"), "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9000\r\n\r\n");
        let mut slow = TcpStream::connect(server.addr).await.unwrap();
        slow.write_all(head.as_bytes()).await.unwrap();
        slow.write_all(&[b'x'; 8999]).await.unwrap();
        // The body is held once it has arrived.
        while !get(&client, &server.url("/metrics")).await.1.contains("afresh_buffered_bytes 8999")
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let refused = client.post(&url).body(vec![b'x'; 5000]).send().await.unwrap();
        assert_eq!(refused.status(), 503);
        assert_eq!(refused.headers()["retry-after"], "1");
        slow.write_all(b"x").await.unwrap();
        let mut answer = [0; 12];
        slow.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
        drop(slow);
        // It is released a moment after the answer was sent.
        while !get(&client, &server.url("/metrics")).await.1.contains("afresh_buffered_bytes 0") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(post(&client, &url, vec![b'x'; 5000]).await.0, 200);
        server.end().await;
    });
}

#[test]
fn bodies_for_one_guest_leave_memory_for_those_of_another() {
    let dir = scratch();
    run(async {
        let guests = ["/one", "/two"].map(|route| {
            let mut guest = keeper(dir.path());
            guest.name = route[1..].to_owned();
            guest.route = route.to_owned();
            guest
        });
        let mut config = config(guests);
        config.max_buffered_bytes = 10_000;
        let server = serve(config).await;
        let client = client();
        let mut slow = Vec::new();
        for _ in 0..10 {
            let mut stream = TcpStream::connect(server.addr).await.unwrap();
            let head = "POST /one HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n";
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&[b'x'; 999]).await.unwrap();
            slow.push(stream);
        }
        // Five times 999 bytes are half of it.
        while !get(&client, &server.url("/metrics")).await.1.contains("afresh_buffered_bytes 4995")
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let [one, two] = ["/one", "/two"].map(|route| server.url(route));
        assert_eq!(post(&client, &one, vec![b'x'; 1000]).await.0, 503);
        assert_eq!(post(&client, &two, vec![b'x'; 2000]).await.0, 200);
        drop(slow);
        server.end().await;
    });
}

#[test]
fn a_thousand_idle_connections_do_not_keep_a_request_from_its_answer() {
    let dir = scratch();
    run(async {
        let server = serve(config([keeper(dir.path())])).await;
        let mut idle = Vec::new();
        for _ in 0..1000 {
            match TcpStream::connect(server.addr).await {
                Ok(stream) => idle.push(stream),
                // The host allows no more open files.
                Err(error) => {
                    println!("with {} idle connections: {error}", idle.len());
                    idle.truncate(idle.len() / 2);
                    break;
                }
            }
        }
        let client = client();
        for _ in 0..20 {
            assert_eq!(post(&client, &server.url("/"), "x").await, (200, "warm".to_owned()));
        }
        drop(idle);
        server.end().await;
    });
}

#[test]
fn requests_find_their_guest_by_host_and_route_and_have_a_number() {
    let dir = scratch();
    run(async {
        let mut guests = Vec::new();
        for (name, route, host) in [
            ("root", "/", None),
            ("api", "/api", None),
            ("deep", "/api/deep", None),
            ("other", "/", Some("other.example")),
        ] {
            let file = write(dir.path(), &format!("{name}.wasm"), &parrot(name));
            let mut guest = afresh_serve::GuestConfig::new(file);
            guest.name = name.to_owned();
            guest.route = route.to_owned();
            guest.host = host.map(str::to_owned);
            guest.content_type = "text/plain".to_owned();
            guests.push(guest);
        }
        let server = serve(config(guests)).await;
        let client = client();
        for (path, name) in [
            ("/", "root"),
            ("/apiary", "root"),
            ("/api", "api"),
            ("/api/x?y", "api"),
            ("/api/deep/er", "deep"),
        ] {
            assert_eq!(get(&client, &server.url(path)).await, (200, name.to_owned()), "{path}");
        }
        let request = client.get(server.url("/api")).header("host", "OTHER.example:80");
        let answer = request.header("x-request-id", "my-number.1").send().await.unwrap();
        assert_eq!(answer.headers()["x-request-id"], "my-number.1");
        assert_eq!(answer.headers()["content-type"], "text/plain");
        assert_eq!(answer.text().await.unwrap(), "other");
        let mut numbers = Vec::new();
        for wrong in ["", "a b", "{}", &"x".repeat(65)] {
            let request = client.get(server.url("/")).header("x-request-id", wrong);
            let answer = request.send().await.unwrap();
            numbers.push(answer.headers()["x-request-id"].to_str().unwrap().to_owned());
        }
        numbers.sort();
        numbers.dedup();
        assert_eq!(numbers.len(), 4, "{numbers:?}");
        server.end().await;
    });
}

#[test]
fn unknown_routes_and_operations_are_answered_as_json_and_by_their_own_door() {
    let dir = scratch();
    run(async {
        let mut guest = keeper(dir.path());
        guest.route = "/guest".to_owned();
        let mut config = config([guest]);
        config.admin = Some("127.0.0.1:0".parse().unwrap());
        let server = afresh_serve::Server::bind(config).await.unwrap();
        let (addr, admin, handle) = (server.addr(), server.admin(), server.handle());
        let task = tokio::spawn(server.run());
        let client = client();
        for path in ["/", "/nothing", "/metrics", "/healthz"] {
            let answer = client.get(format!("http://{addr}{path}")).send().await.unwrap();
            assert_eq!(answer.status(), 404, "{path}");
            assert_eq!(answer.headers()["content-type"], "application/json");
            assert!(answer.text().await.unwrap().contains(r#""code":404"#));
        }
        for (path, status) in
            [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/guest", 404)]
        {
            assert_eq!(get(&client, &format!("http://{admin}{path}")).await.0, status, "{path}");
        }
        handle.shutdown();
        tokio::time::timeout(TEST_TIMEOUT, task).await.expect("it ends").unwrap();
    });
}

/// Sends requests until stopped; returns the answers, and panics when one does not come.
async fn ask_always(url: String, stop: Arc<AtomicBool>) -> Vec<String> {
    let client = client();
    let mut answers = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let (status, answer) = post(&client, &url, "ask").await;
        assert_eq!(status, 200, "{answer}");
        answers.push(answer);
    }
    answers
}

#[test]
fn guests_are_exchanged_without_a_lost_request() {
    let dir = scratch();
    run(async {
        let file = write(dir.path(), "guest.wasm", &parrot("version 0"));
        let config = config([afresh_serve::GuestConfig::new(file.clone())]);
        let server = serve(config.clone()).await;
        let stop = Arc::new(AtomicBool::new(false));
        let asking: Vec<_> =
            (0..4).map(|_| tokio::spawn(ask_always(server.url("/"), stop.clone()))).collect();
        for version in 1..=5 {
            write(dir.path(), "guest.wasm", &parrot(&format!("version {version}")));
            server.handle.reload(&config).await.unwrap();
            let answer = post(&client(), &server.url("/"), "ask").await;
            assert_eq!(answer, (200, format!("version {version}")));
            // One that cannot be opened leaves those there are.
            std::fs::write(&file, "no guest").unwrap();
            server.handle.reload(&config).await.unwrap_err();
            let answer = post(&client(), &server.url("/"), "ask").await;
            assert_eq!(answer, (200, format!("version {version}")));
        }
        stop.store(true, Ordering::Relaxed);
        for asked in asking {
            let answers = asked.await.unwrap();
            assert!(answers.is_sorted() && answers.iter().all(|a| a.starts_with("version ")));
        }
        let metrics = get(&client(), &server.url("/metrics")).await.1;
        assert!(metrics.contains("afresh_reloads_total 5"), "{metrics}");
        assert!(metrics.contains("afresh_failed_reloads_total 5"), "{metrics}");
        server.end().await;
    });
}

#[test]
fn a_server_that_ends_answers_what_has_reached_it() {
    let dir = scratch();
    run(async {
        let mut guest = keeper(dir.path());
        guest.timeout = Duration::from_secs(6);
        let server = serve(config([guest])).await;
        let addr = server.addr;
        let answered = Arc::new(AtomicUsize::new(0));
        let mut asking = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let answered = answered.clone();
            asking.spawn(async move {
                loop {
                    // A client without a connection has lost nothing; a client with one gets an
                    // answer.
                    let Ok(mut stream) = TcpStream::connect(addr).await else { return };
                    let request = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx";
                    stream.write_all(request).await.unwrap();
                    let mut answer = String::new();
                    stream.read_to_string(&mut answer).await.unwrap();
                    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("warm"), "{answer}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // One that takes long, and one that keeps its connection.
        let url = server.url("/");
        let long = tokio::spawn(async move { post(&client(), &url, "!spin").await.0 });
        let keeping = client();
        assert_eq!(post(&keeping, &server.url("/"), "x").await.0, 200);
        while answered.load(Ordering::Relaxed) < 20 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ready = server.url("/readyz");
        server.handle.shutdown();
        let told = keeping.get(&ready).send().await.unwrap();
        assert_eq!(
            (told.status().as_u16(), &told.headers()["connection"]),
            (503, &"close".parse().unwrap())
        );
        tokio::time::timeout(TEST_TIMEOUT, server.task).await.expect("it ends").unwrap();
        assert_eq!(long.await.unwrap(), 504);
        while let Some(asked) = asking.join_next().await {
            asked.unwrap();
        }
        assert!(TcpStream::connect(addr).await.is_err());
    });
}

#[test]
fn a_client_that_disconnects_ends_its_call() {
    let dir = scratch();
    run(async {
        let mut guest = keeper(dir.path());
        guest.max_concurrent_requests = 1;
        let server = serve(config([guest])).await;
        for _ in 0..3 {
            let mut gone = TcpStream::connect(server.addr).await.unwrap();
            gone.write_all(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n!spin")
                .await
                .unwrap();
            let running = r#"afresh_running{guest="guest"} 1"#;
            while !get(&client(), &server.url("/metrics")).await.1.contains(running) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            drop(gone);
            // The only place is free again long before the call's time is over.
            assert_eq!(post(&client(), &server.url("/"), "x").await, (200, "warm".to_owned()));
        }
        server.end().await;
    });
}

#[test]
fn a_micro_vm_answers_too() {
    let Some(file) = built("vm/hash") else { return };
    if let Err(error) = std::fs::File::open("/dev/kvm") {
        println!("SKIPPED: /dev/kvm: {error}");
        return;
    }
    run(async {
        let mut guest = afresh_serve::GuestConfig::new(file);
        guest.memory = 64 << 20;
        let server = serve(config([guest])).await;
        let client = client();
        let url = server.url("/");
        let first = post(&client, &url, "bytes").await;
        assert_eq!((first.0, first.1.is_empty()), (200, false));
        for _ in 0..20 {
            assert_ne!(post(&client, &url, "others").await, first);
            assert_eq!(post(&client, &url, "bytes").await, first);
        }
        server.end().await;
    });
}

#[test]
fn the_keeper_guest_keeps_its_input_without_a_reset() {
    // Otherwise the tests above would pass with a guest that forgets by itself.
    let wasm = wat::parse_str(KEEPER).unwrap();
    let options = afresh::Options::new().warm(afresh::Call::text("warm", [] as [&str; 0]));
    let guest = afresh::Guest::from_bytes("keeper", &wasm, &options).unwrap();
    let mut lease = guest.lease().unwrap();
    assert_eq!(lease.call("handle", b"canary").unwrap(), b"warm");
    assert_eq!(lease.call("handle", b"next").unwrap(), b"canary");
}
