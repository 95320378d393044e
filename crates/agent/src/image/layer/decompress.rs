//! Decompression of layers: gzip and zstd, recognised by their first bytes, since media types are often wrong.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const BUFFER_BYTES: usize = 128 << 10;
/// Memory that one zstd frame may demand.
const ZSTD_WINDOW_BYTES_MAX: u64 = 128 << 20;

/// Returns the uncompressed bytes of a layer.
pub(super) fn decompress<'a>(layer: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut layer = BufReader::with_capacity(BUFFER_BYTES, layer);
    let start = layer.fill_buf()?;
    if start.starts_with(&GZIP) {
        return Ok(Box::new(MultiGzDecoder::new(layer)));
    }
    if start.starts_with(&ZSTD) {
        return Ok(Box::new(ZstdReader::new(layer)));
    }
    Ok(Box::new(layer))
}

/// Reads all frames of a zstd stream, and skips those without contents.
struct ZstdReader<R: Read> {
    source: BufReader<R>,
    decoder: FrameDecoder,
    is_inside_frame: bool,
}

impl<R: Read> ZstdReader<R> {
    fn new(source: BufReader<R>) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(ZSTD_WINDOW_BYTES_MAX);
        Self { source, decoder, is_inside_frame: false }
    }

    /// Reads the header of the next frame, or skips a frame without contents.
    fn begin_frame(&mut self) -> io::Result<()> {
        match self.decoder.init(&mut self.source) {
            Ok(()) => {
                self.is_inside_frame = true;
                Ok(())
            }
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length, ..
            })) => {
                let length = u64::from(length);
                let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                if skipped == length { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
            }
            Err(error) => Err(invalid_data(&error)),
        }
    }
}

fn invalid_data(error: &FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while !buffer.is_empty() {
            if !self.is_inside_frame {
                if self.source.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.begin_frame()?;
                continue;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one).map_err(|error| invalid_data(&error))?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            self.is_inside_frame = false;
        }
        Ok(0)
    }
}
