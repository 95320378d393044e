//! An HTTP client for services, with plain sockets.

use std::{
    io::{self, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use crate::server::TOKEN;

const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// A response.
#[derive(Clone, Debug)]
pub struct HttpResponse {
    pub status: u16,
    pub body: String,
}

impl HttpResponse {
    fn read_response(bytes: &[u8]) -> io::Result<Self> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let cut = || io::Error::new(io::ErrorKind::UnexpectedEof, format!("no whole answer: {text:?}"));
        let (head, body) = text.split_once("\r\n\r\n").ok_or_else(cut)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(cut)?;
        let length = head
            .lines()
            .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned));
        if length.and_then(|length| length.parse::<usize>().ok()).is_some_and(|length| body.len() < length) {
            return Err(cut());
        }
        Ok(Self { status, body: body.to_owned() })
    }
}

#[derive(Clone)]
pub struct ServiceCaller {
    address: String,
    token: Option<String>,
    host: String,
}

impl ServiceCaller {
    pub fn new(address: &str) -> Self {
        Self { address: address.to_owned(), token: Some(TOKEN.to_owned()), host: "services.test".to_owned() }
    }

    /// Returns a caller with another `Host` header.
    pub fn with_host(&self, host: &str) -> Self {
        Self { host: host.to_owned(), ..self.clone() }
    }

    pub fn with_token(&self, token: Option<&str>) -> Self {
        Self { token: token.map(str::to_owned), ..self.clone() }
    }

    /// Sends a request; the caller reads the response.
    pub fn send(&self, method: &str, path: &str, fields: &str, body: &[u8]) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        let token = self.token.as_ref().map(|token| format!("Authorization: Bearer {token}\r\n"));
        let length =
            if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\n{}{length}{fields}\r\n",
            self.host,
            token.unwrap_or_default()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        Ok(stream)
    }

    pub fn request(&self, method: &str, path: &str, body: &[u8]) -> io::Result<HttpResponse> {
        read(self.send(method, path, "Connection: close\r\n", body)?)
    }

    pub fn get(&self, path: &str) -> io::Result<HttpResponse> {
        self.request("GET", path, b"")
    }
}

/// Reads the whole response, to the end of the connection.
pub fn read(mut stream: TcpStream) -> io::Result<HttpResponse> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    HttpResponse::read_response(&bytes)
}

/// Reads until the response contains a text, and returns what was read.
pub fn read_until(stream: &mut TcpStream, words: &str) -> String {
    let mut text = String::new();
    let mut piece = [0_u8; 4096];
    while !text.contains(words) {
        let count = stream.read(&mut piece).unwrap();
        assert!(count > 0, "it ended before {words:?}: {text:?}");
        text.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    text
}
