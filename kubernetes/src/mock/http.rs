//! As much of HTTP/1.1 as the clients need.

use std::collections::BTreeMap;
use std::sync::Arc;

use reqwest::Url;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::UnboundedReceiver;

/// A request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: Vec<String>,
    pub(super) query: BTreeMap<String, String>,
    pub(super) body: Value,
    /// The key of a creation.
    pub(super) key: Option<String>,
}

/// An answer.
pub(super) enum Reply {
    Json(u16, Value),
    /// A list that lacks an entry.
    Partial(Value),
    /// Another one than JSON.
    Html(u16),
    /// Lines, until the sender ends.
    Lines(UnboundedReceiver<String>),
}

/// A server.
pub(super) trait Handler: Send + Sync + 'static {
    fn answer(&self, request: Request) -> impl Future<Output = Reply> + Send;
}

/// Starts a server: its port.
pub(super) async fn serve<H: Handler>(handler: Arc<H>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let handler = handler.clone();
            // A client that leaves ends its connection.
            tokio::spawn(async move { connection(stream, &*handler).await.ok() });
        }
    });
    port
}

async fn connection<H: Handler>(stream: TcpStream, handler: &H) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (mut length, mut key) = (0, None);
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).await?;
            let Some((name, value)) = header.trim().split_once(':') else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().expect("a length");
            }
            if name.eq_ignore_ascii_case("idempotency-key") {
                key = Some(value.trim().to_owned());
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).await?;
        let url = Url::parse(&format!("http://localhost{target}")).expect("a URL");
        let path = url.path_segments().into_iter().flatten().map(str::to_owned).collect();
        let query = url.query_pairs().into_owned().collect();
        let body = serde_json::from_slice(&body).unwrap_or_default();
        let mut further = "";
        let (status, kind, text) =
            match handler.answer(Request { method, path, query, body, key }).await {
                Reply::Json(status, value) => (status, "application/json", value.to_string()),
                Reply::Partial(value) => {
                    further = "x-afresh-unreadable: 1\r\n";
                    (200, "application/json", value.to_string())
                }
                Reply::Html(status) => (status, "text/html", "<html></html>".to_owned()),
                Reply::Lines(mut lines) => {
                    writer.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n").await?;
                    while let Some(line) = lines.recv().await {
                        writer.write_all(format!("{line}\n").as_bytes()).await?;
                    }
                    return Ok(());
                }
            };
        // At once: two writes wait for each other's acknowledgement.
        let answer = format!(
            "HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
             {further}\r\n{text}",
            text.len()
        );
        writer.write_all(answer.as_bytes()).await?;
    }
}
