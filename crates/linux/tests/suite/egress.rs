//! Rules for HTTP requests: unmodified clients of a guest against a server of HTTPS that logs what
//! it is sent.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use afresh_linux::{
    ConnectionLog, ConnectionReceiver, ConnectionRecord, Instance, NetGrant, Outcome, Program, Warm,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{here, python};

const SECRET: &str = "a-secret-that-no-guest-has-7f3a";

/// Logs each request as a line of JSON, and answers with its method, path and length of the body.
const SERVER: &str = r#"
import http.server, json, ssl, sys
log = open(sys.argv[3], "a", buffering=1)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def serve(self):
        if "chunked" in self.headers.get("transfer-encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
        log.write(json.dumps([self.command, self.path, self.headers.items(), len(body)]) + "\n")
        text = f"{self.command} {self.path} {len(body)}".encode()
        if self.path == "/v1/away":
            self.send_response(302)
            self.send_header("location", "https://other.test/")
            text = b""
        else:
            self.send_response(200)
        if self.path == "/v1/chunks":
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in (b"one", b"two" * 30000):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
    do_GET = do_POST = do_DELETE = do_HEAD = do_PUT = serve
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
"#;

const GUEST: &str = r#"
import http.client, json, os, socket, ssl, subprocess, sys, urllib.error, urllib.request

def get(url, method="GET", size=0, headers=None):
    data = b"x" * size if size else None
    request = urllib.request.Request(url, method=method, data=data, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [answer.status, answer.read().decode()]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode()]

def raw(text, name="api.test", port=443, tls=True, alpn=None, at="api.test"):
    with socket.create_connection((at, port), timeout=60) as plain:
        if tls:
            context = ssl.create_default_context()
            context.check_hostname = False
            if alpn:
                context.set_alpn_protocols(alpn)
            plain = context.wrap_socket(plain, server_hostname=name)
        plain.sendall(text.encode())
        out = b""
        while piece := plain.recv(1 << 16):
            out += piece
        return out.decode()

def upload(name, size):
    with socket.create_connection((name, 80), timeout=60) as plain:
        head = f"POST /a HTTP/1.1\r\nHost: {name}\r\nContent-Length: {size}\r\n\r\n"
        try:
            plain.sendall(head.encode() + b"x" * size)
            error = None
        except OSError as caught:
            error = type(caught).__name__
        return [error, plain.recv(1 << 16).decode()]

def keep(paths):
    connection = http.client.HTTPSConnection("api.test", timeout=60)
    found = []
    for path in paths:
        connection.request("POST", path, body=iter([b"ab", b"cde"]), encode_chunked=True,
                           headers={"transfer-encoding": "chunked"})
        found.append(connection.getresponse().read().decode())
    return found

def requests_get(url):
    try:
        import requests
    except ImportError:
        return None
    return requests.get(url, timeout=60).text

def curl(*arguments):
    done = subprocess.run(["curl", "-sS", "-m", "60", *arguments], capture_output=True, text=True)
    return [done.returncode, done.stdout, done.stderr]

def env(name):
    return os.environ.get(name)

for line in sys.stdin:
    word, *rest = json.loads(line)
    try:
        print(json.dumps(globals()[word](*rest)), flush=True)
    except OSError as error:
        print(json.dumps(type(error).__name__), flush=True)
"#;

/// The server outside, with a certificate for `api.test`.
struct Origin {
    child: Child,
    folder: TempDir,
    port: u16,
}

impl Drop for Origin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Origin {
    fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let config = "[req]\ndistinguished_name=dn\nx509_extensions=own\nprompt=no\n[dn]\nCN=api.test\n[own]\n\
                      subjectAltName=DNS:api.test\nbasicConstraints=critical,CA:FALSE\n";
        std::fs::write(at("config"), config).unwrap();
        std::fs::write(at("server.py"), SERVER).unwrap();
        std::fs::write(at("log"), "").unwrap();
        std::fs::write(at("secret"), format!("{SECRET}\n")).unwrap();
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ])
            .args(["-days", "2", "-config", "config", "-keyout", "key.pem", "-out", "ca.pem"])
            .current_dir(folder.path())
            .output();
        if !made.is_ok_and(|made| made.status.success()) {
            println!("SKIPPED: no certificate without openssl");
            return None;
        }
        let child = Command::new("python3")
            .args(["server.py", "ca.pem", "key.pem", "log"])
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            println!("SKIPPED: no python3");
            return None;
        };
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Some(Self { child, port: line.trim().parse().unwrap(), folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The requests so far.
    fn requests(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("log")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// A guest with rules for this server.
    fn program(&self) -> Option<Program> {
        let to = format!("api.test:443=127.0.0.1:{}", self.port);
        let rules = [
            json!({
                "to": to, "methods": ["GET", "POST"], "paths": ["/v1/**"], "ca": self.path("ca.pem"), "log": true,
                "headers": {"X-Team": "blue"},
                "credential": {
                    "header": "authorization", "prefix": "Bearer ", "file": self.path("secret"),
                    "placeholder": "API_KEY",
                },
            }),
            json!({"to": to, "methods": ["DELETE"], "paths": ["/v1/mine"], "ca": self.path("ca.pem")}),
            // Its certificate is for another name.
            json!({"to": format!("other.test:443=127.0.0.1:{}", self.port), "ca": self.path("ca.pem")}),
            // The authorities of this host have not issued it.
            json!({"to": format!("strange.test:443=127.0.0.1:{}", self.port)}),
        ];
        let program = python()?.arg("/app.py").file("/app.py", GUEST).env("PATH", "/usr/bin:/bin");
        Some(rules.iter().fold(program, |program, rule| {
            program.reach(rule.to_string().parse::<NetGrant>().unwrap())
        }))
    }
}

fn ask(instance: &mut Instance, task: Value) -> Value {
    let answer = instance.call(format!("{task}\n").as_bytes()).unwrap();
    serde_json::from_slice(&answer).unwrap_or_else(|error| panic!("{task}: {error}: {answer:?}"))
}

#[derive(Default)]
struct Records(Mutex<Vec<ConnectionRecord>>);

impl ConnectionReceiver for Records {
    fn record(&self, record: &ConnectionRecord) {
        self.0.lock().unwrap().push(record.clone());
    }
}

/// The credential that the server saw with a request.
fn credential(request: &Value) -> Vec<String> {
    let headers = request[2].as_array().unwrap().iter();
    let named =
        headers.filter(|one| one[0].as_str().unwrap().eq_ignore_ascii_case("authorization"));
    named.map(|one| one[1].as_str().unwrap().to_owned()).collect()
}

#[test]
fn clients_send_only_allowed_requests_and_never_have_the_secret() {
    let Some(origin) = Origin::start() else { return };
    let Some(program) = origin.program() else { return };
    let Some(warm) = here(program.warm()) else { return };
    let mut instance = warm.instance();
    let records = Arc::new(Records::default());
    let log = ConnectionLog::new("a-guest", records.clone());
    let secret = format!("Bearer {SECRET}");
    log.within(|| {
        let mut run = |task| ask(&mut instance, task);
        assert_eq!(run(json!(["get", "https://api.test/v1/a?q=1"])), json!([200, "GET /v1/a?q=1 0"]));
        // A header of the guest does not replace the rule's, by any spelling.
        let own = json!({"Authorization": "Bearer mine", "X_Team": "red"});
        let found = run(json!(["get", "https://api.test/v1/../v1/%61", "POST", 200_000, own]));
        assert_eq!(found, json!([200, "POST /v1/a 200000"]));
        assert_eq!(run(json!(["keep", ["/v1/one", "/v1/two"]])), json!(["POST /v1/one 5", "POST /v1/two 5"]));
        let chunks = run(json!(["get", "https://api.test/v1/chunks"]));
        assert_eq!(chunks[1].as_str().unwrap().len(), 90_003);
        let found = run(json!(["requests_get", "https://api.test/v1/r"]));
        assert!(found.is_null() || found == json!("GET /v1/r 0"), "{found}");
        let found = run(json!(["curl", "https://api.test/v1/c"]));
        assert!(found == json!("FileNotFoundError") || found == json!([0, "GET /v1/c 0", ""]), "{found}");
        let found = run(json!(["curl", "-F", "a=b", "-H", "Expect: 100-continue", "https://api.test/v1/c"]));
        assert!(found == json!("FileNotFoundError") || found[0] == 0, "{found}");
        for request in origin.requests() {
            assert_eq!(credential(&request), [secret.as_str()], "{request}");
            let headers = request[2].to_string();
            assert!(headers.contains("blue") && !headers.contains("red"), "{request}");
        }
        // The second rule allows one path more, without the credential.
        assert_eq!(run(json!(["get", "https://api.test/v1/mine", "DELETE"])), json!([200, "DELETE /v1/mine 0"]));
        assert_eq!(credential(origin.requests().last().unwrap()), [""; 0]);
        let before = origin.requests().len();
        // Wrong methods and paths, and paths that only look right.
        for (path, method) in [
            ("/v1/a", "PUT"),
            ("/v1/a", "DELETE"),
            ("/v2/a", "GET"),
            ("/v1/../v2", "GET"),
            ("/v1/%2e%2e/v2", "GET"),
            ("/v1/%2f", "GET"),
        ] {
            let found = run(json!(["get", format!("https://api.test{path}"), method]));
            assert!(found[0] == 403 || found[0] == 400, "{method} {path}: {found}");
            assert!(found[1].as_str().unwrap().starts_with("afresh: "), "{found}");
        }
        for text in [
            "GET /v1/a HTTP/1.1\r\nHost: other.test\r\n\r\n",
            "GET https://other.test/v1/a HTTP/1.1\r\nHost: api.test\r\n\r\n",
            "POST /v1/a HTTP/1.1\r\nHost: api.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "GET /v1/a HTTP/1.1\r\nHost: api.test\r\nX: 1\r\n folded\r\n\r\n",
            "GET /v1/a HTTP/1.1\r\nHost: api.test\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
            "GET /v1/a HTTP/1.1\nHost: api.test\n\n",
        ] {
            let found = run(json!(["raw", text]));
            let found = found.as_str().unwrap_or_default();
            assert!(found.starts_with("HTTP/1.1 40"), "{text:?}: {found}");
        }
        // Another name in TLS, none, plain HTTP, HTTP/2, another port, another server behind the
        // name.
        let get = "GET /v1/a HTTP/1.1\r\nHost: api.test\r\n\r\n";
        for task in [
            json!(["raw", get, "other.test"]),
            json!(["raw", get, null]),
            json!(["raw", get, "api.test", 443, true, ["h2"]]),
            json!(["raw", get, "api.test", 8443]),
            json!(["raw", get, "api.test", 443, true, null, "127.0.0.1"]),
        ] {
            let found = run(task.clone());
            assert!(found.as_str().is_some_and(|text| text.ends_with("Error")), "{task}: {found}");
        }
        let found = run(json!(["raw", get, "api.test", 443, false]));
        assert!(!found.as_str().unwrap().starts_with("HTTP/1.1 200"), "{found}");
        for name in ["other.test", "strange.test"] {
            assert_eq!(run(json!(["get", format!("https://{name}/")]))[0], 502, "{name}");
        }
        // A redirect is the guest's to follow: the next request is checked by itself.
        let found = run(json!(["get", "https://api.test/v1/away"]));
        assert_eq!(found[0], 502);
        assert_eq!(origin.requests().len(), before + 1);
        assert_eq!(run(json!(["env", "API_KEY"])), json!("afresh-placeholder"));
        assert_eq!(run(json!(["get", "https://unknown.test/"])), json!("URLError"));
    });
    // Neither memory nor files nor what the guest is sent have the secret.
    let frozen = instance.freeze().unwrap();
    let mut memory = vec![0; frozen.memory().pages().pages() << 12];
    frozen.memory().pages().read(0, &mut memory);
    for bytes in [&memory[..], &frozen.bytes().unwrap()] {
        assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()));
    }
    let records = records.0.lock().unwrap();
    let text = format!("{records:?}");
    assert!(!text.contains(SECRET) && !text.contains("q=1"), "{text}");
    let count = |outcome| records.iter().filter(|record| record.outcome == outcome).count();
    assert!(
        count(Outcome::Allowed) > 10 && count(Outcome::Refused) > 10 && count(Outcome::Failed) > 1,
        "{text}"
    );
    assert!(
        records.iter().any(|one| one.request == Some(("DELETE".into(), "/v1/a".into()))),
        "{text}"
    );
    assert!(
        records.iter().any(|one| one.host == "unknown.test" && one.outcome == Outcome::Refused)
    );
    drop(records);
    // A guest out of a snapshot trusts its opener's rules, whose authority is another one.
    let program = origin.program().unwrap();
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    assert_eq!(
        ask(&mut thawed, json!(["get", "https://api.test/v1/b"])),
        json!([200, "GET /v1/b 0"])
    );
    thawed.reset();
    assert_eq!(
        ask(&mut thawed, json!(["get", "https://api.test/v1/b"])),
        json!([200, "GET /v1/b 0"])
    );
    thawed.verify().unwrap();
}

#[test]
fn a_guest_without_rules_has_neither_authority_nor_variables() {
    let Some(program) = python() else { return };
    let program = program.arg("/app.py").file("/app.py", GUEST);
    let plain = program.reach("api.test:443".parse::<NetGrant>().unwrap());
    let Some(warm) = here(plain.warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, json!(["env", "SSL_CERT_FILE"])), Value::Null);
    let bundle = instance.files().read_path("/etc/ssl/certs/ca-certificates.crt", 1 << 20);
    let text = String::from_utf8_lossy(&bundle.unwrap_or_default()).into_owned();
    assert!(!text.contains("egress rules"));
}

/// The proxy closes before it has the body: the guest's writes fail, and it reads the refusal.
#[test]
fn a_refusal_of_a_long_body_is_not_lost() {
    let Some(program) = python() else { return };
    let program = program.arg("/app.py").file("/app.py", GUEST);
    let rule = json!({"to": "plain.test:80=127.0.0.1:1", "methods": ["GET"]}).to_string();
    let program = program.reach(rule.parse::<NetGrant>().unwrap());
    let Some(warm) = here(program.warm()) else { return };
    let found = ask(&mut warm.instance(), json!(["upload", "plain.test", 8_000_000]));
    assert_eq!(found[0], "BrokenPipeError", "{found}");
    let text = found[1].as_str().unwrap();
    assert!(text.starts_with("HTTP/1.1 403") && text.contains("no rule allows POST /a"), "{text}");
}
