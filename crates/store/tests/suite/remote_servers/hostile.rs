//! Registries that are broken, mean, or only slow to be convinced.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_store::remote::{Remote, RemoteError, RetryPolicy};
use afresh_store::{Access, Encoding, Limits, OpenError, Sha256};

use super::local;
use super::stub::{Stub, answer};

fn open(stub: &Stub) -> Remote {
    let retry =
        RetryPolicy { attempts: 3, pause: Duration::from_millis(1), ..super::servers::retry() };
    let url = format!("oci://{}/a", stub.address);
    Remote::open_with(&url, retry, &[("user", "me"), ("password", "secret-word")]).unwrap()
}

/// A manifest of a snapshot with the configuration `{}` and a layer that is not there.
fn manifest() -> String {
    let config = Sha256::of(b"{}");
    let digest = format!("sha256:{}", "1".repeat(64));
    format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/vnd.afresh.snapshot.v1","config":{{"mediaType":"application/vnd.afresh.snapshot.config.v1+json","digest":"{config}","size":2}},"layers":[{{"mediaType":"application/vnd.afresh.snapshot.pages.v1","digest":"{digest}","size":9000}}]}}"#
    )
}

#[test]
fn an_answer_without_end_is_cut_off() {
    for head in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 500 No\r\n\r\n"] {
        let stub = Stub::new(move |_| [head.as_bytes(), &vec![b' '; 64 << 20]].concat());
        let start = Instant::now();
        let error = open(&stub).load("x").unwrap_err();
        let known = matches!(
            error,
            RemoteError::Protocol { .. } | RemoteError::Refused { status: 500, .. }
        );
        assert!(known, "{error}");
        assert!(start.elapsed() < Duration::from_secs(200));
    }
}

#[test]
fn a_manifest_must_have_the_digest_that_comes_with_it() {
    let other = Sha256::of(b"other");
    let stub = Stub::new(move |_| {
        let head = format!("Docker-Content-Digest: {other}\r\n");
        answer("200 OK", &head, manifest().as_bytes())
    });
    let error = open(&stub).load("x").unwrap_err();
    assert!(matches!(error, RemoteError::Open(OpenError::Digest { .. })), "{error}");
    let error = open(&stub).load(&other.to_string()).unwrap_err();
    assert!(matches!(error, RemoteError::Open(OpenError::Digest { .. })), "{error}");
}

#[test]
fn a_registry_that_knows_no_ranges_is_named_as_such() {
    let stub = Stub::new(|request| {
        if request.contains("/manifests/") {
            answer("200 OK", "", manifest().as_bytes())
        } else if request.to_lowercase().contains("range:") {
            answer("200 OK", "", &[7; 10_000])
        } else {
            answer("200 OK", "", b"{}")
        }
    });
    let error = open(&stub).load("x").unwrap_err().to_string();
    assert!(error.contains("ranges"), "{error}");
}

#[test]
fn a_busy_registry_is_asked_again_and_a_refusal_is_not() {
    for (status, wanted) in [("429 Slow Down", 3), ("503 Later", 3), ("400 Bad", 1), ("403 No", 1)]
    {
        let stub = Stub::new(move |_| {
            answer(status, "", br#"{"errors":[{"code":"DENIED","message":"not\u001b[2J so"}]}"#)
        });
        let error = open(&stub).load("x").unwrap_err().to_string();
        assert!(error.contains(&status[..3]) && error.contains("DENIED not[2J so"), "{error}");
        assert_eq!(stub.requests().len(), wanted, "{status}");
    }
}

#[test]
fn credentials_stay_with_the_registry() {
    // The registry wants a password, and sends uploads elsewhere.
    let storage = Stub::new(|_| answer("201 Created", "", b""));
    let elsewhere = storage.address;
    let stub = Stub::new(move |request| {
        if !request.to_lowercase().contains("authorization: basic") {
            return answer("401 No", "WWW-Authenticate: Basic realm=\"x\"\r\n", b"");
        }
        if request.starts_with("POST") {
            let head = format!("Location: http://{elsewhere}/upload?part=1\r\n");
            return answer("202 Accepted", &head, b"");
        }
        if request.starts_with("PUT") {
            return answer("201 Created", "", b"");
        }
        answer("404 Not Found", "", b"")
    });
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, _) = local(dir.path(), 1, 30);
    open(&stub).push(&here, &snapshot, "x", Encoding::Raw, &mut |_| {}).unwrap();
    let sent = storage.requests();
    assert_eq!(sent.len(), 4);
    for request in sent {
        assert!(request.starts_with("PUT /upload?part=1&digest=sha256%3A"), "{request}");
        assert!(!request.to_lowercase().contains("authorization"), "{request}");
    }
    // The password was asked for once.
    let asked = stub.requests();
    let refused = asked.iter().filter(|r| !r.to_lowercase().contains("authorization"));
    assert_eq!(refused.count(), 1);

    // One that sends reads elsewhere.
    let stub = Stub::new(move |request| {
        if !request.to_lowercase().contains("authorization: basic") {
            return answer("401 No", "WWW-Authenticate: Basic realm=\"x\"\r\n", b"");
        }
        let head = format!("Location: http://{elsewhere}/blob\r\n");
        answer("307 Elsewhere", &head, b"")
    });
    assert!(open(&stub).load("x").is_err());
    let seen = storage.requests();
    assert!(!seen.is_empty());
    assert!(seen.iter().all(|request| !request.to_lowercase().contains("authorization")));

    // Storage that asks for a password, or names a token server, gets no credentials.
    let tokens = Stub::new(|_| answer("200 OK", "", br#"{"token":"t"}"#));
    let realm = tokens.address;
    for challenge in
        ["Basic realm=\"x\"".to_owned(), format!("Bearer realm=\"http://{realm}/token\"")]
    {
        let head = format!("WWW-Authenticate: {challenge}\r\n");
        let greedy = Stub::new(move |_| answer("401 No", &head, b""));
        let elsewhere = greedy.address;
        let stub = Stub::new(move |_| {
            answer("307 Elsewhere", &format!("Location: http://{elsewhere}/blob\r\n"), b"")
        });
        let error = open(&stub).load("x").unwrap_err();
        assert!(matches!(error, RemoteError::Refused { status: 401, .. }), "{error}");
        let seen = greedy.requests();
        assert!(!seen.is_empty());
        assert!(seen.iter().all(|request| !request.to_lowercase().contains("authorization")));
        assert_eq!(tokens.requests(), [""; 0], "{challenge}");
    }
}

#[test]
fn a_page_in_place_of_a_registry_takes_no_push() {
    let stub = Stub::new(|request| match request.split(' ').next() {
        Some("HEAD") => answer("404 Not Found", "", b""),
        _ => answer(
            "200 OK",
            "Content-Type: text/html\r\nLocation: /upload\r\n",
            b"<html>log in</html>",
        ),
    });
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, _) = local(dir.path(), 1, 30);
    let error = open(&stub).push(&here, &snapshot, "x", Encoding::Raw, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("the upload ended with 200"), "{error}");
    // One that takes blobs, and whose tags mean nothing.
    let stub = Stub::new(|request| match request.split(' ').next() {
        Some("PUT") if !request.contains("/manifests/") => answer("201 Created", "", b""),
        Some("HEAD") => answer("404 Not Found", "", b""),
        _ => answer("200 OK", "Location: /upload\r\n", b"<html>log in</html>"),
    });
    let error = open(&stub).push(&here, &snapshot, "x", Encoding::Raw, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("instead of 201 Created"), "{error}");
}

#[test]
fn a_wrong_layer_of_a_tebibyte_is_refused_before_it_is_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, _) = local(dir.path(), 1, 30);
    let read = |digest: &str| std::fs::read(here.blob_path(digest.parse().unwrap())).unwrap();
    let manifest = read(&snapshot.id().to_string());
    let mut manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let config = read(manifest["config"]["digest"].as_str().unwrap());
    manifest["layers"][0]["size"] = (1_u64 << 40).into();
    manifest["layers"][0]["digest"] = format!("sha256:{}", "5".repeat(64)).into();
    let config_path = format!("/blobs/{}", manifest["config"]["digest"].as_str().unwrap());
    let manifest = manifest.to_string();
    let stub = Stub::new(move |request| {
        if request.contains("/manifests/") {
            return answer("200 OK", "", manifest.as_bytes());
        }
        if request.contains(&config_path) {
            return answer("200 OK", "", &config);
        }
        let lower = request.to_lowercase();
        let range = lower.lines().find_map(|line| line.strip_prefix("range: bytes=")).unwrap();
        let (first, last) = range.trim().split_once('-').unwrap();
        let len = last.parse::<u64>().unwrap() - first.parse::<u64>().unwrap() + 1;
        answer("206 Partial Content", "", &vec![7; usize::try_from(len).unwrap()])
    });
    let other = tempfile::tempdir().unwrap();
    let to = afresh_store::Store::create(other.path()).unwrap();
    let none = |progress: afresh_store::remote::Progress| assert_eq!(progress.done, 0);
    let error = open(&stub).pull(&to, "x", "x", Encoding::Raw, &mut { none }).unwrap_err();
    assert!(matches!(error, RemoteError::Open(OpenError::Layer { .. })), "{error}");
    assert!(stub.requests().len() < 8);
    assert_eq!(std::fs::read_dir(other.path().join("blobs/sha256")).unwrap().count(), 0);
}

#[test]
fn a_token_that_is_not_taken_any_more_is_replaced() {
    let given = AtomicUsize::new(0);
    let stub = Stub::new(move |request| {
        let host = request
            .lines()
            .find_map(|l| l.to_lowercase().strip_prefix("host: ").map(str::to_owned));
        let host = host.unwrap();
        if request.starts_with("GET /token") {
            let token = given.fetch_add(1, Ordering::Relaxed);
            let body = format!(r#"{{"access_token":"t{token}"}}"#);
            return answer("200 OK", "", body.as_bytes());
        }
        // The first token is never good.
        if !request.contains("Bearer t1") {
            let head = format!("WWW-Authenticate: Bearer realm=\"http://{host}/token\"\r\n");
            return answer("401 No", &head, b"");
        }
        answer("200 OK", "", br#"{"tags":["b","a",".bad"]}"#)
    });
    let remote = open(&stub);
    let error = remote.load("x").unwrap_err();
    assert!(matches!(error, RemoteError::Refused { status: 401, .. }), "{error}");
    let error = remote.load("x").unwrap_err();
    assert!(matches!(error, RemoteError::Open(_)), "{error}");
}

#[test]
fn a_list_of_tags_is_read_to_its_end_and_bounded() {
    let id = Sha256::of(b"");
    let stub = Stub::new(move |request| {
        let line = request.lines().next().unwrap();
        if line.starts_with("HEAD") {
            return answer("200 OK", &format!("Docker-Content-Digest: {id}\r\n"), b"");
        }
        // Every page names a next one.
        let page = line.split("last=").nth(1).map_or(0, |n| n[..1].parse::<u8>().unwrap());
        let head = format!("Link: </v2/a/tags/list?last={}>; rel=\"next\"\r\n", (page + 1) % 9);
        answer("200 OK", &head, format!(r#"{{"name":"a","tags":["t{page}"]}}"#).as_bytes())
    });
    let tags = open(&stub).tags().unwrap();
    let names: Vec<_> = tags.iter().map(|tag| tag.name.as_str()).collect();
    assert_eq!(names, ["t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8"]);
    assert!(tags.iter().all(|tag| tag.id == id));
}

/// Every page names another one, so that all of them have gigabytes of names.
#[test]
fn a_list_of_tags_that_does_not_end_is_refused() {
    for (names, why) in [(4000, "more than 65536 tags"), (1, "more than 256 pages")] {
        let pages = AtomicUsize::new(0);
        let stub = Stub::new(move |_| {
            let page = pages.fetch_add(1, Ordering::Relaxed);
            let names: Vec<_> = (0..names).map(|name| format!("\"t{page}-{name}\"")).collect();
            let head = format!("Link: </v2/a/tags/list?last={page}>; rel=\"next\"\r\n");
            answer("200 OK", &head, format!(r#"{{"tags":[{}]}}"#, names.join(",")).as_bytes())
        });
        let error = open(&stub).tags().unwrap_err();
        assert!(matches!(error, RemoteError::Protocol { .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains(why) && said.contains("a repository with fewer tags"), "{said}");
    }
}

/// Each layer has an index within the limit; all of them together are beyond it.
#[test]
fn indexes_of_all_layers_together_are_limited_before_they_are_fetched() {
    const LAYERS: usize = 40;
    const EXTENTS: u64 = 40_000;
    let len = EXTENTS * 24;
    let mut footer = [0; 192];
    footer[..8].copy_from_slice(b"AFRESHPG");
    footer[8..12].copy_from_slice(&1_u32.to_le_bytes());
    footer[20..24].copy_from_slice(&16_u32.to_le_bytes());
    // Pages, stored pages, extents, length of the data, place and length of the index.
    for (at, word) in [EXTENTS, 0, EXTENTS, 0, 0, len].iter().enumerate() {
        footer[24 + at * 8..32 + at * 8].copy_from_slice(&word.to_le_bytes());
    }
    let size = len + 192;
    let layers: Vec<String> = (0..LAYERS)
        .map(|layer| {
            format!(
                r#"{{"mediaType":"application/vnd.afresh.snapshot.pages.v1","digest":"sha256:{layer:064}","size":{size}}}"#
            )
        })
        .collect();
    let mut manifest: serde_json::Value = serde_json::from_str(&manifest()).unwrap();
    manifest["layers"] = serde_json::from_str(&format!("[{}]", layers.join(","))).unwrap();
    let manifest = manifest.to_string();
    let stub = Stub::new(move |request| {
        if request.contains("/manifests/") {
            return answer("200 OK", "", manifest.as_bytes());
        }
        let lower = request.to_lowercase();
        let Some(range) = lower.lines().find_map(|line| line.strip_prefix("range: bytes=")) else {
            return answer("200 OK", "", b"{}");
        };
        let (first, last) = range.trim().split_once('-').unwrap();
        let (first, last) = (first.parse::<u64>().unwrap(), last.parse::<u64>().unwrap());
        let mut bytes = vec![0; usize::try_from(last - first + 1).unwrap()];
        if last + 1 == size {
            let at = bytes.len() - footer.len();
            bytes[at..].copy_from_slice(&footer);
        }
        answer("206 Partial Content", "", &bytes)
    });
    let limits = Limits { index: 2 << 20, ..Limits::default() };
    let access = Access::new().with_limits(limits);
    let error = open(&stub).load_with("x", &access).unwrap_err();
    assert!(matches!(error, RemoteError::Open(OpenError::Limit { name: "index", .. })), "{error}");
    let rests = stub.requests();
    let rests = rests.iter().filter(|request| request.to_lowercase().contains("range: bytes=0-"));
    // Two of 960 KB fit.
    assert!(rests.count() <= 2);
}
