//! `sandbox/resume_s3`: a sandbox that another host has saved, taken out of an S3 server that is 5
//! ms further away than loopback.
//!
//! A host makes sandboxes, saves them and ends. A second one, which has no copy of them, continues
//! each: it reads the entry from the ledger and the pages from the store, and runs a first piece of
//! code.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;

use super::sandboxes::{KEY, Sandboxes};
use super::server::{REQUEST_TIMEOUT, Server};
use super::{Files, TABLE};
use crate::row::{Options, Sink, summarise};

/// The added delay of each answer from the store.
const LATENCY: Duration = Duration::from_millis(5);
/// Sandboxes of a round.
const SANDBOXES: usize = 8;

/// A program that ends with this.
struct Engine(Child);

impl Drop for Engine {
    fn drop(&mut self) {
        // Ended or not, it is of no use any more.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// Starts a program that must listen there.
fn start(command: &mut Command, addr: SocketAddr) -> anyhow::Result<Engine> {
    let what = command.get_program().display().to_string();
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut engine = Engine(child.with_context(|| format!("starting {what}"))?);
    let begun = Instant::now();
    while TcpStream::connect(addr).is_err() {
        ensure!(engine.0.try_wait()?.is_none(), "{what} ended");
        ensure!(begun.elapsed() < REQUEST_TIMEOUT, "{what} takes no connections");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(engine)
}

/// A way to `server` on which each answer takes longer. Its threads end with the process.
fn far_away(server: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // A connection that cannot be passed on is closed, which its client sees.
            let _ = pass_on(&client, server);
        }
    });
    Ok(addr)
}

fn pass_on(client: &TcpStream, server: SocketAddr) -> std::io::Result<()> {
    let server = TcpStream::connect(server)?;
    for stream in [client, &server] {
        stream.set_nodelay(true)?;
    }
    let (there, back) = ((client.try_clone()?, server.try_clone()?), (server, client.try_clone()?));
    std::thread::spawn(move || pass(there.0, there.1, Duration::ZERO));
    std::thread::spawn(move || pass(back.0, back.1, LATENCY));
    Ok(())
}

/// Passes bytes on, each `later` than it came; many may be under way.
fn pass(mut from: TcpStream, mut to: TcpStream, later: Duration) {
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    let writer = std::thread::spawn(move || {
        for (came, bytes) in receiver {
            std::thread::sleep((came + later).saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut buffer = vec![0; 256 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if sender.send((Instant::now(), buffer[..read].to_vec())).is_err() {
            break;
        }
    }
    drop(sender);
    // The connection is over in any case.
    let _ = writer.join();
}

/// The whole case.
pub(super) fn resume(
    files: &Files,
    nats: &Path,
    s3: &Path,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (nats_addr, s3_addr) = (free()?, free()?);
    let mut command = Command::new(nats);
    command.args(["-a", "127.0.0.1", "-p", &nats_addr.port().to_string(), "-js", "-sd"]);
    let _nats = start(command.arg(dir.path().join("nats")), nats_addr)?;
    let data = dir.path().join("data");
    std::fs::create_dir_all(data.join("bucket"))?;
    let mut command = Command::new(s3);
    command
        .args(["--access", "bench", "--secret", "not-a-secret", "--port", &s3_addr.to_string()])
        .args(["--quiet", "--keep-alive", "posix"])
        .arg(&data)
        .current_dir(dir.path());
    let _s3 = start(&mut command, s3_addr)?;
    let environment = [
        ("AWS_ENDPOINT", format!("http://{}", far_away(s3_addr)?)),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_ACCESS_KEY_ID", "bench".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "not-a-secret".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
    ];
    std::fs::write(dir.path().join("keys"), format!("bench {KEY}\n"))?;
    let host = |name: &str| -> anyhow::Result<Server> {
        let own = dir.path().join(name);
        std::fs::create_dir_all(&own)?;
        let config = own.join("serve.toml");
        let script = std::path::absolute(&files.script)?;
        let text = format!(
            "[sandboxes]\nkeys = {:?}\nstore = \"store\"\n[[sandboxes.template]]\nname = \"script\"\n\
             guest = {:?}\n",
            dir.path().join("keys").display().to_string(),
            script.display().to_string(),
        );
        std::fs::write(&config, text)?;
        let (config, nats) = (config.display().to_string(), format!("nats://{nats_addr}"));
        let arguments = ["--config", &config, "--nats", &nats, "--store", "s3://bucket/fleet"];
        let arguments = [&arguments[..], &["--host-name", name]].concat();
        Server::ours_with(&files.program, &arguments, &environment)
    };
    let mut times = Vec::new();
    for round in 0..options.rounds.clamp(1, 5) {
        let mut first = host(&format!("saves-{round}"))?;
        let mut client = Sandboxes::of(&first)?;
        let mut made = Vec::with_capacity(SANDBOXES);
        for _ in 0..SANDBOXES {
            let sandbox = client.create("script")?;
            client.run(
                &sandbox,
                "var heap = Array.from({length: 1000}, (_, n) => ({ n })); var n = 1",
            )?;
            client.on(&sandbox, "/pause", &json!({}))?;
            made.push(sandbox);
        }
        first.end()?;
        let second = host(&format!("goes-on-{round}"))?;
        let mut client = Sandboxes::of(&second)?;
        for sandbox in &made {
            let begun = Instant::now();
            client.on(sandbox, "/connect", &json!({}))?;
            client.run(sandbox, "heap[999].n + n")?;
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        for sandbox in &made {
            client.on(sandbox, "", &json!({}))?;
        }
    }
    let mut row = summarise(TABLE, "sandbox/resume_s3", "afresh".to_owned(), 1, times);
    row.more.push(("added_latency_ms", json!(LATENCY.as_millis() as u64)));
    sink(&row);
    Ok(())
}
