//! The least HTTP/1.1 that talks to a local server: one request, one connection, the whole answer.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result};

const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("ask for a free port")?;
    Ok(listener.local_addr()?.port())
}

pub(crate) fn get(port: u16, path: &str) -> Result<Answer> {
    exchange(port, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
}

pub(crate) fn post(port: u16, path: &str, token: &str, body: &str) -> Result<Answer> {
    let len = body.len();
    exchange(
        port,
        &format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\
             Content-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
        ),
    )
}

fn exchange(port: u16, request: &str) -> Result<Answer> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(request.as_bytes())?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Result<Answer> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").context("find the end of the answer's head")?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("read the status")?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunk(body)? } else { body.to_owned() };
    Ok(Answer { status, body })
}

fn unchunk(mut rest: &str) -> Result<String> {
    let mut body = String::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let len = usize::from_str_radix(size.trim(), 16).context("read a chunk's length")?;
        if len == 0 {
            break;
        }
        body.push_str(tail.get(..len).context("a chunk is cut off")?);
        rest = tail.get(len + 2..).context("a chunk is cut off")?;
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_post_carries_token_and_length_and_its_answer_comes_back() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = String::new();
            while !request.ends_with("{\"a\":1}") {
                let mut bytes = [0; 1024];
                let len = stream.read(&mut bytes).unwrap();
                request.push_str(std::str::from_utf8(&bytes[..len]).unwrap());
            }
            stream.write_all(b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok").unwrap();
            request
        });
        let answer = post(port, "/x", "secret", "{\"a\":1}").unwrap();
        let request = server.join().unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (201, "ok"));
        assert!(request.starts_with("POST /x HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("\r\nAuthorization: Bearer secret\r\n"), "{request}");
        assert!(request.contains("\r\nContent-Length: 7\r\n"), "{request}");
    }

    #[test]
    fn plain_and_chunked_answers_read_the_same() {
        let plain = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").unwrap();
        let chunked =
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n";
        assert_eq!(plain.status, 200);
        assert_eq!(plain.body, "hello");
        assert_eq!(parse(chunked).unwrap().body, "hello");
        assert!(parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhe").is_err());
    }
}
