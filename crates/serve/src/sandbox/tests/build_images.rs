//! Images that builds start from, out of a registry whose tags move.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::thread::JoinHandle;

use afresh::Sha256;

use super::*;
use crate::sandbox::catalog::builds::ImageGuest;
use crate::sandbox::catalog::template::Warm;

/// A registry that has one manifest under every tag.
struct Registry {
    address: SocketAddr,
    manifest: Arc<Mutex<Option<String>>>,
    thread: JoinHandle<()>,
}

impl Registry {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let manifest = Arc::new(Mutex::new(Some(String::new())));
        let answered = manifest.clone();
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Some(manifest) = lock(&answered).clone() else { return };
                answer(stream.unwrap(), &manifest);
            }
        });
        Self { address, manifest, thread }
    }

    fn stop(self) {
        *lock(&self.manifest) = None;
        drop(TcpStream::connect(self.address).unwrap());
        self.thread.join().unwrap();
    }
}

/// Answers one request.
fn answer(mut stream: TcpStream, manifest: &str) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).unwrap_or(0) == 0 {
            return;
        }
        head.extend_from_slice(&byte);
    }
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let length = manifest.len();
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{manifest}"
    );
    stream.write_all(answer.as_bytes()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_starts_from_the_image_that_its_tag_means_now() {
    let dir = tempfile::tempdir().unwrap();
    let (mut config, registry) = (config(&dir), Registry::start());
    let address = registry.address;
    config.build_images = vec![format!("{address}/")];
    let all = open(&config).await;
    let build = all.builds.add(&TENANT.into(), "web".to_owned(), Vec::new()).unwrap();
    let (app, other) = (format!("{address}/app:v1"), format!("{address}/other:v1"));
    let pin = async |name: &str, is_forced| {
        let pinned = all.pin_image(&build, name, is_forced).await;
        pinned.map(|image| image.reference).map_err(|refusal| refusal.message)
    };
    let mut last = String::new();
    for manifest in ["{}", "{ }"] {
        *lock(&registry.manifest) = Some(manifest.to_owned());
        last = pin(&app, false).await.unwrap();
        assert_eq!(last, format!("oci://{address}/app@{}", Sha256::of(manifest.as_bytes())));
    }

    // Without the registry a build starts from an open image of the tag.
    let opened = config.clone();
    let open = move |tag: &str| {
        let mut warm = Warm::open_as(&opened, &opened.templates[0], None, tag.to_owned()).unwrap();
        warm.config.linux = true;
        Arc::new(warm)
    };
    let opening = || (open("reloaded-0-template-first"), open("template-image-0"));
    let (first, warm) = tokio::task::block_in_place(opening);
    all.replace_templates(vec![first.clone()]);
    let reference = last.clone();
    all.keep_image(app.clone(), ImageGuest { warm, template: first, reference });
    tokio::task::block_in_place(|| registry.stop());
    assert_eq!(pin(&app, false).await, Ok(last));
    for (name, is_forced) in [(&app, true), (&other, false)] {
        let why = pin(name, is_forced).await.unwrap_err();
        assert!(why.contains("cannot be used"), "{why}");
    }
    let why = pin("elsewhere/app:v1", false).await.unwrap_err();
    assert!(why.contains("is not allowed"), "{why}");
}
