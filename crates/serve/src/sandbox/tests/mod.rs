//! Sandboxes of a server without HTTP, of a small guest.

mod build_images;
mod ends;
mod faulty_store;
mod file_memory;
mod leases;
mod names;
mod processors;
mod refused_pauses;
mod reloads;
mod removed_templates;
mod restarted_code;
mod restarts;
mod saved_states;
mod template_sources;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh::Options;
use afresh_interpreter::{Answer, RUN};
use tempfile::TempDir;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::config::{SandboxConfig, Template};
use crate::sandbox::lifecycle::creation::CreateOptions;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox, run};
use crate::sandbox::records::record::SandboxSettings;
use crate::sandbox::records::store::SandboxStore;

/// Far longer than anything takes on a busy host.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);
pub(crate) const HOUR: Duration = Duration::from_secs(3600);
const TENANT: &str = "acme";

/// A guest that appends eight bytes of each piece of code to a log in its memory, and answers the
/// log. Code that begins with `!` takes 16 MiB of memory first, and `?` never ends.
const LOGGER: &str = r#"(module
    (memory (export "memory") 3)
    ;; An array of three, with a text of two bytes of length; the length is kept at 1020, too.
    (data (i32.const 1024) "\83\00\f6\79\00\00")
    (func (export "warm"))
    (func (export "afresh_buffer") (param i32) (result i32)
        (if (result i32) (i32.gt_u (local.get 0) (i32.const 60000))
            (then (i32.const 0)) (else (i32.const 65536))))
    (func (export "evaluate") (param i32) (result i64)
        (local $length i32)
        (if (i32.eq (i32.load8_u (i32.const 65540)) (i32.const 63)) (then (loop (br 0))))
        (if (i32.eq (i32.load8_u (i32.const 65540)) (i32.const 33))
            (then
                (local.set $length (i32.mul (memory.grow (i32.const 256)) (i32.const 65536)))
                (memory.fill (local.get $length) (i32.const 1) (i32.const 0x1000000))))
        (local.set $length (i32.load (i32.const 1020)))
        (i64.store (i32.add (i32.const 1030) (local.get $length)) (i64.load (i32.const 65540)))
        (local.set $length (i32.add (local.get $length) (i32.const 8)))
        (i32.store (i32.const 1020) (local.get $length))
        (i32.store8 (i32.const 1028) (i32.shr_u (local.get $length) (i32.const 8)))
        (i32.store8 (i32.const 1029) (local.get $length))
        (i64.or
            (i64.shl (i64.const 1024) (i64.const 32))
            (i64.extend_i32_u (i32.add (local.get $length) (i32.const 6))))))"#;

pub(crate) fn config(dir: &TempDir) -> SandboxConfig {
    let guest = dir.path().join("logger.wasm");
    std::fs::write(&guest, wat::parse_str(LOGGER).unwrap()).unwrap();
    let mut config = SandboxConfig::new(dir.path().join("server"));
    // A call that ends does so for another reason.
    config.call_timeout = HOUR;
    config.templates.push(Template::new("logger", guest.to_str().unwrap(), Options::new()));
    config
}

pub(crate) async fn open(config: &SandboxConfig) -> Arc<Sandboxes> {
    Sandboxes::open(config, None, None).await.unwrap()
}

async fn open_with(config: &SandboxConfig, store: Arc<dyn SandboxStore>) -> Arc<Sandboxes> {
    Sandboxes::open(config, None, Some(store)).await.unwrap()
}

pub(crate) fn options(time: Duration) -> CreateOptions {
    CreateOptions {
        template: "logger".to_owned(),
        template_only: false,
        time,
        pause_at_end: false,
        settings: SandboxSettings::default(),
    }
}

pub(crate) async fn make(all: &Arc<Sandboxes>, options: CreateOptions) -> Arc<Sandbox> {
    all.create(&TENANT.into(), options).await.unwrap()
}

/// Runs code; the log.
async fn log(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    code: &str,
) -> Result<String, ErrorResponse> {
    let (own, mut router) = (sandbox.clone(), all.output_router(sandbox));
    let language = all.template_of(sandbox).language;
    let code = code.to_owned();
    let ran = all.with(sandbox, move |session| {
        let mut mark = lock(&own.mark);
        router.begin(Vec::new());
        run(session, language, (RUN, &code), &mut mark, &mut router)
    });
    match ran.await? {
        Answer::Value(value) => Ok(value.text),
        other => panic!("{other:?}"),
    }
}

/// Waits until something holds.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let limit = Instant::now() + TEST_TIMEOUT;
    while !holds().await {
        assert!(Instant::now() < limit, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn is_saved(sandbox: &Sandbox) -> bool {
    matches!(*sandbox.life.lock().await, Residency::Saved)
}

/// Writes a file into a sandbox.
async fn write(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    path: &'static str,
    text: &'static str,
) {
    let written = all.files(sandbox, move |tree| {
        tree.write_path(path, text.as_bytes(), afresh::files::Time::now()).unwrap();
        Ok(())
    });
    written.await.unwrap();
}

async fn read(all: &Arc<Sandboxes>, sandbox: &Arc<Sandbox>, path: &'static str) -> String {
    let read = all.tree(sandbox, move |tree| Ok(tree.read_path(path, 1 << 20).unwrap()));
    String::from_utf8(read.await.unwrap()).unwrap()
}

/// The file with the record of a sandbox.
fn record_file(dir: &Path, id: &str) -> std::path::PathBuf {
    dir.join("server/sandboxes").join(id).with_extension("json")
}

/// The names of saved sandboxes in the store.
fn state_names(dir: &Path) -> Vec<String> {
    let store = afresh::store::Store::open(dir.join("server/snapshots")).unwrap();
    let names = store.tags().unwrap().into_iter().map(|tag| tag.name);
    names.filter(|name| name.starts_with("sandbox-")).collect()
}
