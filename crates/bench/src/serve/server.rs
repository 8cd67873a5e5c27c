//! Servers in separate processes, and a minimal client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longest that anything may take.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A server in a separate process.
pub(super) struct Server {
    pub(super) child: Child,
    pub(super) addr: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended or not, it is of no use any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// `afresh serve`, which prints its address.
    pub(super) fn ours(program: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::ours_with(program, arguments, &[])
    }

    /// The same, with further variables of the environment.
    pub(super) fn ours_with(
        program: &Path,
        arguments: &[&str],
        environment: &[(&str, String)],
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args(["-o", "json", "serve", "--addr", "127.0.0.1:0"]).args(arguments);
        if let Some(folder) = crate::code_cache::folder() {
            command.arg("--cache").arg(folder);
        }
        let mut child = command
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("starting the server")?;
        let mut line = String::new();
        let out = child.stdout.take().context("the server's output")?;
        BufReader::new(out).read_line(&mut line)?;
        let said: Value = serde_json::from_str(&line).context("the server did not start")?;
        let addr = said["addr"].as_str().context("the server's address")?.parse()?;
        Ok(Self { child, addr })
    }

    /// Ends it as an operator would, and waits until it has.
    pub(super) fn end(&mut self) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        self.child.wait()?;
        Ok(())
    }

    /// `wasmtime serve` at an address that was free a moment ago.
    pub(super) fn theirs(program: &Path, component: &Path) -> anyhow::Result<Self> {
        let addr = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let child = Command::new(program)
            .args(["serve", "-S", "cli", "--addr", &addr.to_string()])
            .arg(component)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting wasmtime serve")?;
        let mut this = Self { child, addr };
        let begun = Instant::now();
        while TcpStream::connect(addr).is_err() {
            ensure!(this.child.try_wait()?.is_none(), "wasmtime serve ended");
            ensure!(begun.elapsed() < REQUEST_TIMEOUT, "wasmtime serve takes no connections");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(this)
    }
}

/// One connection of a client.
pub(super) struct Connection {
    stream: BufReader<TcpStream>,
}

/// A request as it is sent.
pub(super) fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: bench\r\n{headers}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

impl Connection {
    pub(super) fn to(addr: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends a request and reads its answer: the status and the body.
    pub(super) fn exchange(&mut self, request: &[u8]) -> anyhow::Result<(u16, Vec<u8>)> {
        self.stream.get_mut().write_all(request)?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status: u16 = status.with_context(|| format!("no answer but {line:?}"))?;
        let (mut length, mut chunked) = (0, false);
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let header = line.trim().to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            chunked |= header == "transfer-encoding: chunked";
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        while chunked {
            line.clear();
            self.stream.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim(), 16).context("the size of a chunk")?;
            let begin = body.len();
            body.resize(begin + length + 2, 0);
            self.stream.read_exact(&mut body[begin..])?;
            body.truncate(begin + length);
            chunked = length > 0;
        }
        Ok((status, body))
    }
}

/// KiB of resident memory of a process.
pub(super) fn resident(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    number.context("the server's resident memory")
}
