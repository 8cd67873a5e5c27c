//! The domain of the sandboxes under test, and servers in place of some on the internet.
//!
//! Clients reach programs in a sandbox at `PORT-ID.DOMAIN` by HTTPS. Names of the domain lead to
//! this host within the tests alone, so that no name server is needed. Sandboxes reach the servers
//! of [`STAND_INS`] through the `net` of their template, which leads to one on this host. It shows
//! a certificate for all of them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::command::{OwnedChild, run};

/// The domain of the sandboxes. Its names lead to the server, whose certificate is for them.
pub(super) const DOMAIN: &str = "sandbox.test";
/// A plugin of pytest that resolves names of the domain.
const PYTHON_NAMES: &str = "import socket
plain = socket.getaddrinfo
def resolve(host, *arguments, **options):
    name = host.decode() if isinstance(host, bytes) else host
    if isinstance(name, str) and name.endswith('.sandbox.test'):
        host = '127.0.0.1'
    return plain(host, *arguments, **options)
socket.getaddrinfo = resolve
";
/// The same for Node.js.
const NODE_NAMES: &str = "import dns from 'node:dns'
const plain = dns.lookup
dns.lookup = (host, ...rest) =>
  plain(String(host).endsWith('.sandbox.test') ? '127.0.0.1' : host, ...rest)
";

/// Servers that the suites reach from sandboxes by HTTPS.
const STAND_INS: [&str; 3] = ["1.1.1.1", "8.8.8.8", "connectivitycheck.gstatic.com"];
/// A server that answers in their place, with their status codes. It prints its port.
const STAND_IN: &str = "import http.server, ssl, sys
STATUS = {'1.1.1.1': 301, '8.8.8.8': 302, 'connectivitycheck.gstatic.com': 204}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(STATUS.get(self.headers['Host'], 404))
        self.send_header('Content-Length', '0')
        self.end_headers()
    do_HEAD = do_GET
    def log_message(self, *_):
        pass
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('server.pem', 'server.key')
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
";

/// The files of the domain in a folder, and the server in place of others.
pub(super) struct Domain {
    folder: PathBuf,
    stand_in: u16,
    _server: OwnedChild,
}

impl Domain {
    /// Writes the files, with a new certificate, and starts the server.
    pub(super) fn create(folder: PathBuf, python: &Path) -> Result<Self> {
        fs::create_dir_all(&folder)?;
        let mut make = Command::new(python);
        make.args(["-m", "trustme", "--quiet", "--dir"]).arg(&folder).arg("--identities");
        run(make.args([&format!("*.{DOMAIN}"), "127.0.0.1"]).args(STAND_INS))?;
        fs::write(folder.join("sandbox_names.py"), PYTHON_NAMES)?;
        fs::write(folder.join("sandbox_names.mjs"), NODE_NAMES)?;
        // Apart from the key, because sandboxes read its folder.
        fs::create_dir_all(folder.join("root"))?;
        fs::rename(folder.join("client.pem"), folder.join("root/client.pem"))?;
        let mut serve = Command::new(python);
        serve.args(["-c", STAND_IN]).current_dir(&folder).stdin(Stdio::null());
        let mut server = OwnedChild(serve.stdout(Stdio::piped()).spawn()?);
        let stdout = server.0.stdout.take().context("the server has no output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let stand_in =
            line.trim().parse().context("the server in place of others did not start")?;
        Ok(Self { folder, stand_in, _server: server })
    }

    /// The certificate that clients check, also those in a sandbox.
    pub(super) fn root(&self) -> PathBuf {
        self.folder.join("root/client.pem")
    }

    /// The `net` of a template.
    pub(super) fn net(&self) -> String {
        let grant = |name: &&str| format!("{name}:443=127.0.0.1:{}", self.stand_in);
        format!("{:?}", STAND_INS.iter().map(grant).collect::<Vec<_>>())
    }

    /// Lines for the configuration of the server.
    pub(super) fn config(&self) -> String {
        let file = |name| self.folder.join(name).display().to_string();
        format!("tls-cert = {:?}\ntls-key = {:?}\n", file("server.pem"), file("server.key"))
    }

    /// Sets the addresses of the server at a port, for clients in Python or JavaScript.
    pub(super) fn set(&self, tests: &mut Command, port: u16) -> Result<()> {
        let url = format!("https://127.0.0.1:{port}");
        tests.env("E2B_API_URL", &url).env("E2B_SANDBOX_URL", url);
        tests.env("E2B_DOMAIN", format!("{DOMAIN}:{port}"));
        let root = self.root();
        tests.env("SSL_CERT_FILE", &root).env("NODE_EXTRA_CA_CERTS", &root);
        tests.env("PYTHONPATH", &self.folder).env("PYTEST_PLUGINS", "sandbox_names");
        let names = self.folder.join("sandbox_names.mjs");
        let names = names.to_str().context("the folder is no text")?;
        tests.env("NODE_OPTIONS", format!("--import=file://{names}"));
        Ok(())
    }
}
