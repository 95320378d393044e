//! Decoder for the chunked coding of a response. Pure: works on a buffer only.

use bytes::{Buf as _, Bytes, BytesMut};
use hyper::{
    HeaderMap,
    header::{HeaderName, HeaderValue},
};

use super::ExchangeError;

/// Maximum length of a line with a chunk size, extensions included; they are not used in practice.
const LINE_MAX: usize = 256;
const TRAILERS_MAX: usize = 16 * 1024;
const TRAILER_FIELDS_MAX: usize = 64;

/// State of the decoder.
#[derive(Debug, Default)]
pub(crate) enum ChunkedDecoder {
    #[default]
    Size,
    Data(u64),
    DataEnd,
    Trailers,
    End,
}

/// Next decoded part.
#[derive(Debug, PartialEq)]
pub(crate) enum ChunkPart {
    Data(Bytes),
    Trailers(HeaderMap),
    End,
    /// More bytes are needed.
    NeedMore,
}

impl ChunkedDecoder {
    pub(crate) fn next(&mut self, buffer: &mut BytesMut) -> Result<ChunkPart, ExchangeError> {
        loop {
            match self {
                Self::Size => {
                    let Some(end) = line_end(buffer, LINE_MAX)? else { return Ok(ChunkPart::NeedMore) };
                    let line = buffer.split_to(end);
                    buffer.advance(2);
                    *self = match parse_size(&line)? {
                        0 => Self::Trailers,
                        size => Self::Data(size),
                    };
                }
                Self::Data(left) => {
                    if buffer.is_empty() {
                        return Ok(ChunkPart::NeedMore);
                    }
                    let take = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len());
                    *left -= take as u64;
                    if *left == 0 {
                        *self = Self::DataEnd;
                    }
                    return Ok(ChunkPart::Data(buffer.split_to(take).freeze()));
                }
                Self::DataEnd => {
                    if buffer.len() < 2 {
                        return Ok(ChunkPart::NeedMore);
                    }
                    if !buffer.starts_with(b"\r\n") {
                        return Err(ExchangeError::Malformed("a chunk is longer than its size"));
                    }
                    buffer.advance(2);
                    *self = Self::Size;
                }
                Self::Trailers => {
                    let Some((length, trailers)) = parse_trailers(buffer)? else {
                        return Ok(ChunkPart::NeedMore);
                    };
                    buffer.advance(length);
                    *self = Self::End;
                    if !trailers.is_empty() {
                        return Ok(ChunkPart::Trailers(trailers));
                    }
                }
                Self::End => return Ok(ChunkPart::End),
            }
        }
    }
}

fn line_end(buffer: &[u8], max: usize) -> Result<Option<usize>, ExchangeError> {
    match buffer.iter().take(max).position(|b| *b == b'\n') {
        Some(at) if at > 0 && buffer.get(at - 1) == Some(&b'\r') => Ok(Some(at - 1)),
        Some(_) => Err(ExchangeError::Malformed("a chunk size does not end with CR LF")),
        None if buffer.len() >= max => Err(ExchangeError::Malformed("a chunk size line is too long")),
        None => Ok(None),
    }
}

fn parse_size(line: &[u8]) -> Result<u64, ExchangeError> {
    let digits = line.iter().position(|b| *b == b';').map_or(line, |at| line.get(..at).unwrap_or(line));
    // White space is allowed before an extension only.
    let digits = if digits.len() < line.len() { digits.trim_ascii_end() } else { digits };
    if digits.is_empty() || digits.len() > 15 {
        return Err(ExchangeError::Malformed("a chunk size is empty or too large"));
    }
    digits.iter().try_fold(0_u64, |size, digit| {
        let digit = char::from(*digit)
            .to_digit(16)
            .ok_or(ExchangeError::Malformed("a chunk size is not a hexadecimal number"))?;
        Ok(size << 4 | u64::from(digit))
    })
}

fn parse_trailers(buffer: &[u8]) -> Result<Option<(usize, HeaderMap)>, ExchangeError> {
    let mut slots = [httparse::EMPTY_HEADER; TRAILER_FIELDS_MAX];
    match httparse::parse_headers(buffer, &mut slots) {
        Ok(httparse::Status::Complete((length, fields))) => {
            let mut map = HeaderMap::new();
            for field in fields {
                let name = HeaderName::from_bytes(field.name.as_bytes());
                let value = HeaderValue::from_bytes(field.value);
                let (Ok(name), Ok(value)) = (name, value) else {
                    return Err(ExchangeError::Malformed("a trailer is not a valid header"));
                };
                map.append(name, value);
            }
            Ok(Some((length, map)))
        }
        Ok(httparse::Status::Partial) if buffer.len() < TRAILERS_MAX => Ok(None),
        Ok(httparse::Status::Partial) | Err(_) => {
            Err(ExchangeError::Malformed("the trailers are invalid or too large"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds the bytes in steps of `step` and collects the output.
    fn decode(text: &str, step: usize) -> Result<(String, Vec<String>, String), String> {
        let (mut state, mut buffer) = (ChunkedDecoder::default(), BytesMut::new());
        let (mut data, mut fields) = (Vec::new(), Vec::new());
        let mut bytes = text.as_bytes().chunks(step);
        loop {
            match state.next(&mut buffer).map_err(|error| error.to_string())? {
                ChunkPart::Data(piece) => data.extend_from_slice(&piece),
                ChunkPart::Trailers(map) => fields.extend(map.keys().map(ToString::to_string)),
                ChunkPart::End => break,
                ChunkPart::NeedMore => buffer.extend_from_slice(bytes.next().ok_or("cut")?),
            }
        }
        buffer.extend(bytes.flatten());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((text(&data), fields, text(&buffer)))
    }

    #[test]
    fn chunked_bodies_are_decoded_regardless_of_read_boundaries() {
        let text = "5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nX-Sum: 1\r\n\r\nnext";
        for step in 1..text.len() {
            let expect = ("hello world".to_owned(), vec!["x-sum".to_owned()], "next".to_owned());
            assert_eq!(decode(text, step), Ok(expect), "step {step}");
        }
        assert_eq!(decode("0\r\n\r\n", 5), Ok((String::new(), vec![], String::new())));
    }

    #[test]
    fn ambiguous_or_malformed_chunks_are_rejected() {
        for text in [
            "5\nhello\r\n0\r\n\r\n",
            "5\r\nhelloX\r\n0\r\n\r\n",
            "-5\r\nhello\r\n0\r\n\r\n",
            "0x5\r\nhello\r\n0\r\n\r\n",
            "5 \r\nhello\r\n0\r\n\r\n",
            "\r\n",
            "ffffffffffffffffff\r\n",
            "0\r\nbad header\r\n\r\n",
        ] {
            assert!(decode(text, 3).is_err(), "{text:?}");
        }
        assert!(decode(&format!("5;{}\r\n", "x".repeat(LINE_MAX)), 64).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Checks that the result does not depend on how the bytes are split, that invalid input is rejected, and that
        /// nothing is read twice.
        #[test]
        fn fuzz_of_chunked_bodies(
            words in prop::collection::vec(
                prop::sample::select(&["0", "5", "ffffffffffffffff", "a;x=y", "\r\n", "\n", "\r", "hello", "X: y", " ", "-1", "0x5", ":"][..]),
                0..24,
            ),
            step in 1_usize..8,
        ) {
            let text = words.concat();
            let whole = decode(&text, text.len().max(1));
            let pieces = decode(&text, step);
            match (&whole, &pieces) {
                (Ok(whole), Ok(pieces)) => prop_assert_eq!(whole, pieces),
                // Truncation may be detected earlier, and for another reason.
                (whole, pieces) => prop_assert_eq!(whole.is_ok(), pieces.is_ok(), "{:?} {:?}", whole, pieces),
            }
        }
    }
}
