//! Parser for the head of a response, and the framing of its body. Strict: ambiguous heads are rejected.

use std::{mem::MaybeUninit, ops::Range};

use bytes::BytesMut;
use hyper::{
    HeaderMap, Method, StatusCode,
    header::{self, HeaderName, HeaderValue},
};

use super::ExchangeError;

pub(crate) const HEAD_MAX: usize = 64 * 1024;
pub(crate) const HEADERS_MAX: usize = 128;

/// Framing of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    None,
    Sized(u64),
    Chunked,
    /// Until the connection is closed.
    Close,
}

/// Head of a response.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) framing: Framing,
    pub(crate) keep_alive: bool,
}

/// Position of a field in a head.
#[derive(Clone, Copy, Default)]
struct HeaderSpan {
    name: u16,
    name_len: u16,
    value: u16,
    value_len: u16,
}

impl HeaderSpan {
    fn name(self) -> Range<usize> {
        usize::from(self.name)..usize::from(self.name) + usize::from(self.name_len)
    }

    fn value(self) -> Range<usize> {
        // An empty value may have any position.
        let start = if self.value_len == 0 { 0 } else { usize::from(self.value) };
        start..start + usize::from(self.value_len)
    }
}

/// Parses and consumes a complete head; `None` while it is incomplete. `headers` is a map to reuse.
pub(super) fn parse(
    buffer: &mut BytesMut,
    method: &Method,
    headers: &mut HeaderMap,
) -> Result<Option<ResponseHead>, ExchangeError> {
    let mut slots = [MaybeUninit::<httparse::Header<'_>>::uninit(); HEADERS_MAX];
    // A head has at most 64 KiB, so 16 bits suffice for positions: less to clear for each response.
    let mut spans = [HeaderSpan::default(); HEADERS_MAX];
    let base = buffer.as_ptr() as usize;
    let (length, version, code, count) = {
        let mut response = httparse::Response::new(&mut []);
        let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(
            &mut response,
            buffer,
            &mut slots,
        );
        let length = match parsed {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if buffer.len() >= HEAD_MAX => {
                return Err(ExchangeError::HeadTooLarge);
            }
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err(ExchangeError::HeadTooLarge),
            Err(_) => return Err(ExchangeError::Malformed("the head is not HTTP/1")),
        };
        if length > HEAD_MAX {
            return Err(ExchangeError::HeadTooLarge);
        }
        for (span, header) in spans.iter_mut().zip(response.headers.iter()) {
            let at = |start: *const u8| (start as usize).wrapping_sub(base) as u16;
            *span = HeaderSpan {
                name: at(header.name.as_ptr()),
                name_len: header.name.len() as u16,
                value: at(header.value.as_ptr()),
                value_len: header.value.len() as u16,
            };
        }
        (length, response.version.unwrap_or(0), response.code.unwrap_or(0), response.headers.len())
    };
    let status = StatusCode::from_u16(code).map_err(|_| ExchangeError::Malformed("invalid status code"))?;
    let head = buffer.split_to(length).freeze();
    let mut headers = std::mem::take(headers);
    headers.clear();
    headers.reserve(count);
    for span in spans.iter().take(count) {
        let name = head.get(span.name()).unwrap_or_default();
        let name =
            HeaderName::from_bytes(name).map_err(|_| ExchangeError::Malformed("invalid header name"))?;
        let value = HeaderValue::from_maybe_shared(head.slice(span.value()))
            .map_err(|_| ExchangeError::Malformed("a header value contains a control character"))?;
        headers.append(name, value);
    }
    let framing = framing(&headers, status, method, version)?;
    let keep_alive = version == 1
        && framing != Framing::Close
        && !headers.get_all(header::CONNECTION).iter().any(|value| has_token(value, b"close"));
    Ok(Some(ResponseHead { status, headers, framing, keep_alive }))
}

fn framing(
    headers: &HeaderMap,
    status: StatusCode,
    method: &Method,
    version: u8,
) -> Result<Framing, ExchangeError> {
    let length = content_length(headers).map_err(ExchangeError::Malformed)?;
    let mut encodings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let encoding = encodings.next();
    if encoding.is_some() && (length.is_some() || encodings.next().is_some() || version != 1) {
        return Err(ExchangeError::Malformed("ambiguous body length"));
    }
    if method == Method::HEAD
        || status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
    {
        return Ok(Framing::None);
    }
    match (encoding, length) {
        (Some(value), _) if value.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(Framing::Chunked),
        (Some(_), _) => Err(ExchangeError::Malformed("the transfer encoding is not `chunked`")),
        (None, Some(0)) => Ok(Framing::None),
        (None, Some(length)) => Ok(Framing::Sized(length)),
        (None, None) => Ok(Framing::Close),
    }
}

/// Returns the content length, on which all its fields must agree.
pub(crate) fn content_length(headers: &HeaderMap) -> Result<Option<u64>, &'static str> {
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        let bytes = value.as_bytes();
        // `u64::from_str` would accept a sign.
        let this = (!bytes.is_empty() && bytes.len() <= 19 && bytes.iter().all(u8::is_ascii_digit))
            .then(|| bytes.iter().fold(0_u64, |n, digit| n * 10 + u64::from(digit - b'0')))
            .ok_or("the content length is not a number")?;
        if length.is_some_and(|length| length != this) {
            return Err("conflicting content lengths");
        }
        length = Some(this);
    }
    Ok(length)
}

/// Returns whether a list of tokens contains this one, case-insensitively.
pub(crate) fn has_token(value: &HeaderValue, token: &[u8]) -> bool {
    value.as_bytes().split(|b| *b == b',').any(|word| word.trim_ascii().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(head: &str, method: Method) -> Result<(u16, Framing, bool), String> {
        let mut buffer = BytesMut::from(format!("{head}\r\n\r\nrest").as_bytes());
        let answer = parse(&mut buffer, &method, &mut HeaderMap::new()).map_err(|error| error.to_string())?;
        let answer = answer.ok_or("incomplete")?;
        assert_eq!(buffer, "rest");
        Ok((answer.status.as_u16(), answer.framing, answer.keep_alive))
    }

    #[test]
    fn response_framing_follows_the_http_standard() {
        let get = Method::GET;
        assert_eq!(
            check("HTTP/1.1 200 OK\r\nContent-Length: 12", get.clone()),
            Ok((200, Framing::Sized(12), true))
        );
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked";
        assert_eq!(check(chunked, get.clone()), Ok((200, Framing::Chunked, true)));
        assert_eq!(check("HTTP/1.1 200 OK\r\nA: ", get.clone()), Ok((200, Framing::Close, false)));
        assert_eq!(
            check("HTTP/1.0 200 OK\r\nContent-Length: 1", get.clone()),
            Ok((200, Framing::Sized(1), false))
        );
        assert_eq!(check("HTTP/1.1 204 No", get.clone()), Ok((204, Framing::None, true)));
        assert_eq!(check("HTTP/1.1 304 Same\r\nContent-Length: 9", get), Ok((304, Framing::None, true)));
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: x, Close";
        assert_eq!(check(head, Method::HEAD), Ok((200, Framing::None, false)));
    }

    #[test]
    fn an_ambiguous_response_head_is_rejected() {
        for head in [
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
            "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
            "HTTP/1.1 200 OK\r\nContent-Length: +1",
            "HTTP/1.1 200 OK\r\nContent-Length: 1, 1",
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999",
            "HTTP/1.1 200 OK\r\nX: a\r\n folded",
            "HTTP/1.1 200 OK\r\nX : a",
            "HTTP/2 200 OK",
        ] {
            assert!(check(head, Method::GET).is_err(), "{head}");
        }
    }

    #[test]
    fn a_response_head_above_the_size_limit_is_rejected() {
        let mut buffer = BytesMut::from(format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(HEAD_MAX)).as_bytes());
        let parsed = parse(&mut buffer, &Method::GET, &mut HeaderMap::new());
        assert!(matches!(parsed, Err(ExchangeError::HeadTooLarge)));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn fuzz_of_response_heads(
            words in prop::collection::vec(
                prop::sample::select(&[
                    "HTTP/1.1 ", "HTTP/1.0 ", "200 OK", "204", "999", "\r\n", "\n", "Content-Length: ", "Transfer-Encoding: ",
                    "chunked", "5", "+5", "18446744073709551616", ": ", "A", " ", "\t", "\0", "é", "Connection: close", ",",
                ][..]),
                0..30,
            ),
            noise in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let message = format!("HTTP/1.1 200 OK\r\n{}\r\n\r\n", words.concat());
            for bytes in [words.concat().as_bytes(), message.as_bytes(), &noise] {
                let mut buffer = BytesMut::from(bytes);
                let Ok(Some(answer)) = parse(&mut buffer, &Method::GET, &mut HeaderMap::new()) else { continue };
                // A head with both a length and an encoding would be ambiguous.
                let lengths = answer.headers.contains_key(header::CONTENT_LENGTH);
                let encodings = answer.headers.contains_key(header::TRANSFER_ENCODING);
                prop_assert!(!(lengths && encodings), "{answer:?}");
                prop_assert!(bytes.ends_with(&buffer), "the rest is what comes after the head");
            }
        }
    }
}
