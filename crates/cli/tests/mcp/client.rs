//! A client of `afresh mcp` on its standard input and output.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// A client on the server's standard input and output.
pub(crate) struct Client {
    pub(crate) child: Child,
    pub(crate) input: Option<ChildStdin>,
    pub(crate) output: BufReader<ChildStdout>,
    count: u64,
    /// Answers that came before they were asked for: calls run side by side.
    early: BTreeMap<u64, Value>,
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Client {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
            .arg("mcp")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        let mut this =
            Self { child, input, output: BufReader::new(output), count: 0, early: BTreeMap::new() };
        let hello = this.ask(
            "initialize",
            json!({"protocolVersion": "2025-06-18", "capabilities": {},
                   "clientInfo": {"name": "test", "version": "1"}}),
        );
        assert_eq!(hello["serverInfo"]["name"], "afresh", "{hello}");
        this.write(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        this
    }

    pub(crate) fn write(&mut self, message: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    pub(crate) fn send(&mut self, method: &str, params: Value) -> u64 {
        self.count += 1;
        let id = self.count;
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        self.write(&request);
        id
    }

    /// The next message of the server.
    pub(crate) fn next(&mut self) -> Value {
        let mut line = String::new();
        if self.output.read_line(&mut line).unwrap() == 0 {
            let mut errors = String::new();
            let _ = self.child.stderr.take().unwrap().read_to_string(&mut errors);
            panic!("the server ended: {errors}");
        }
        serde_json::from_str(&line).unwrap()
    }

    /// The answer to a request, whatever the order of answers. Notifications are left out.
    pub(crate) fn answer(&mut self, id: u64) -> Value {
        loop {
            if let Some(answer) = self.early.remove(&id) {
                return answer;
            }
            let message = self.next();
            if let Some(id) = message["id"].as_u64() {
                self.early.insert(id, message);
            }
        }
    }

    pub(crate) fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params);
        let mut answer = self.answer(id);
        assert!(answer["error"].is_null(), "{answer}");
        answer["result"].take()
    }

    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> Value {
        self.ask("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    /// A call that succeeds: its structured result.
    pub(crate) fn call_ok(&mut self, tool: &str, arguments: Value) -> Value {
        let mut result = self.call(tool, arguments);
        assert_ne!(result["isError"], true, "{result}");
        result["structuredContent"].take()
    }

    /// A call that fails: its text.
    pub(crate) fn refused(&mut self, tool: &str, arguments: Value) -> String {
        let result = self.call(tool, arguments);
        assert_eq!(result["isError"], true, "{result}");
        result["content"][0]["text"].as_str().unwrap().to_owned()
    }
}
