//! Strict reader of a layer: one header after the other.

use std::{
    io::{self, Read},
    os::fd::AsFd,
};

use ring::digest::{Context, SHA256};
use tar::{EntryType, Header};

use super::{
    EXTENDED_BYTES_MAX, Excess, LayerError, LayerLimits, LayerSummary, OwnerIds,
    decompress::decompress,
    escape_name, refused,
    tree::{EntryMeta, LayerTree},
};

const BLOCK: usize = 512;
/// Prefix of extended attributes in PAX headers.
const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
/// Number of extended attributes of one entry.
const XATTRS_MAX: usize = 64;

/// Values from extended headers for the entry that follows them.
#[derive(Default)]
struct ExtendedHeader {
    any: bool,
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<i64>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    is_sparse: bool,
}

/// Unpacks a layer, compressed or not, below `dir`. After an error the directory holds what was created until then, for
/// the caller to remove.
pub fn unpack(
    layer: impl Read,
    dir: impl AsFd,
    limits: &LayerLimits,
    owners: OwnerIds,
) -> Result<LayerSummary, LayerError> {
    let source = decompress(layer).map_err(LayerError::Read)?;
    let mut reader = LayerReader {
        source,
        hash: Context::new(&SHA256),
        left: limits.bytes,
        limits: *limits,
        owners,
        entries: 0,
        bytes: 0,
    };
    let mut tree = LayerTree::new(dir.as_fd())?;
    let mut extended = ExtendedHeader::default();
    while let Some(block) = reader.header()? {
        reader.entry(Header::from_byte_slice(&block), &mut extended, &mut tree)?;
        if reader.entries + tree.implied() > limits.entries {
            return Err(reader.too_many_entries());
        }
    }
    if extended.any {
        return Err(refused("the layer ends after an extended header"));
    }
    reader.drain()?;
    let opaque = tree.finish()?;
    let diff_id = format!("sha256:{}", hex::encode(reader.hash.finish()));
    Ok(LayerSummary { entries: reader.entries, bytes: reader.bytes, diff_id, opaque })
}

struct LayerReader<R> {
    source: R,
    hash: Context,
    /// Bytes that may still be read.
    left: u64,
    limits: LayerLimits,
    owners: OwnerIds,
    entries: u64,
    bytes: u64,
}

impl<R: Read> Read for LayerReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buffer)?;
        self.hash.update(&buffer[..count]);
        match self.left.checked_sub(count as u64) {
            Some(left) => self.left = left,
            None => {
                let message = format!("more than {} uncompressed bytes", self.limits.bytes);
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
            }
        }
        Ok(count)
    }
}

/// Converts a failed read: too large, truncated or not readable at all.
fn read_error(error: io::Error) -> LayerError {
    if error.kind() == io::ErrorKind::FileTooLarge {
        return LayerError::TooLarge { excess: Excess::Bytes, message: error.to_string() };
    }
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return refused("the layer is truncated");
    }
    LayerError::Read(error)
}

impl<R: Read> LayerReader<R> {
    /// Reads the next header. Returns `None` at the end marker, and at the end of a layer without one.
    fn header(&mut self) -> Result<Option<[u8; BLOCK]>, LayerError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(refused("the layer is truncated")),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(error)),
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let sum: u32 = block[..148].iter().chain(&block[156..]).map(|byte| u32::from(*byte)).sum();
        if Header::from_byte_slice(&block).cksum().ok() != Some(sum + 8 * u32::from(b' ')) {
            return Err(refused("invalid tar header"));
        }
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(self.too_many_entries());
        }
        Ok(Some(block))
    }

    fn too_many_entries(&self) -> LayerError {
        let message = format!("more than {} entries", self.limits.entries);
        LayerError::TooLarge { excess: Excess::Entries, message }
    }

    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "every kind this does not name is refused, those to come as well"
    )]
    fn entry(
        &mut self,
        header: &Header,
        extended: &mut ExtendedHeader,
        tree: &mut LayerTree<'_>,
    ) -> Result<(), LayerError> {
        let size = header.entry_size().map_err(|_| refused("invalid tar header"))?;
        let kind = header.entry_type();
        if matches!(kind, EntryType::XHeader | EntryType::GNULongName | EntryType::GNULongLink) {
            extended.any = true;
            let text = self.extended(size)?;
            return extended.add(kind, &text);
        }
        if kind == EntryType::XGlobalHeader {
            self.extended(size)?;
            return Ok(());
        }
        let values = std::mem::take(extended);
        let name = values.path.unwrap_or_else(|| header.path_bytes().into_owned());
        let size = values.size.unwrap_or(size);
        let shown = escape_name(&name);
        if values.is_sparse || kind == EntryType::GNUSparse {
            return Err(refused(format!("`{shown}`: sparse files are not supported")));
        }
        let number = |value: io::Result<u64>, what: &str| {
            let value = value.ok().and_then(|value| u32::try_from(value).ok());
            value.ok_or_else(|| refused(format!("`{shown}`: invalid {what}")))
        };
        let uid = number(values.uid.map_or_else(|| header.uid(), Ok), "user id")?;
        let gid = number(values.gid.map_or_else(|| header.gid(), Ok), "group id")?;
        let (uid, gid) = self.owners.map(uid, gid, &shown)?;
        let mtime = values.mtime.or_else(|| i64::try_from(header.mtime().ok()?).ok()).unwrap_or(0);
        let meta = EntryMeta {
            shown: &shown,
            mode: header.mode().map_err(|_| refused(format!("`{shown}`: invalid mode")))?,
            uid,
            gid,
            mtime,
            xattrs: &values.xattrs,
        };
        let link =
            || values.link.or_else(|| Some(header.link_name_bytes()?.into_owned())).unwrap_or_default();
        let has_data = matches!(kind, EntryType::Regular | EntryType::Continuous);
        if !has_data && size != 0 {
            // Some tools repeat the size of the target in the header of a hard link; no data follows it.
            if kind != EntryType::Link {
                return Err(refused(format!("`{shown}`: unexpected data of {size} bytes")));
            }
        }
        match kind {
            // Old archives mark directories by a final slash only.
            EntryType::Regular if name.ends_with(b"/") && size == 0 => tree.add_directory(&name, &meta),
            EntryType::Regular | EntryType::Continuous => self.file(&name, &meta, size, tree),
            EntryType::Directory => tree.add_directory(&name, &meta),
            EntryType::Symlink => tree.add_symlink(&name, &meta, &link()),
            EntryType::Link => tree.add_hard_link(&name, &meta, &link()),
            EntryType::Fifo => tree.add_fifo(&name, &meta),
            EntryType::Block | EntryType::Char => {
                Err(refused(format!("`{shown}`: device files are not allowed in images")))
            }
            other => {
                let kind = other.as_byte().escape_ascii();
                Err(refused(format!("`{shown}`: unknown entry type `{kind}`")))
            }
        }
    }

    fn file(
        &mut self,
        name: &[u8],
        meta: &EntryMeta<'_>,
        size: u64,
        tree: &mut LayerTree<'_>,
    ) -> Result<(), LayerError> {
        if size > self.left {
            let message = format!(
                "`{}`: its {size} bytes exceed the limit of {} bytes for a layer",
                meta.shown, self.limits.bytes
            );
            return Err(LayerError::TooLarge { excess: Excess::Bytes, message });
        }
        self.bytes = self.bytes.saturating_add(size);
        let mut content = self.by_ref().take(size);
        tree.add_file(name, meta, &mut content, size).map_err(|error| match error {
            LayerError::Read(error) => read_error(error),
            other @ (LayerError::Refused(_) | LayerError::TooLarge { .. } | LayerError::Write { .. }) => {
                other
            }
        })?;
        self.skip_padding(size)
    }

    /// Reads the text of an extended header.
    fn extended(&mut self, size: u64) -> Result<Vec<u8>, LayerError> {
        let too_long = || refused(format!("an extended header of {size} bytes exceeds the limit"));
        if size > EXTENDED_BYTES_MAX {
            return Err(too_long());
        }
        let mut text = vec![0; usize::try_from(size).map_err(|_| too_long())?];
        self.read_exact(&mut text).map_err(read_error)?;
        self.skip_padding(size)?;
        Ok(text)
    }

    /// Skips the padding to a whole block after contents.
    fn skip_padding(&mut self, size: u64) -> Result<(), LayerError> {
        let over = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        if over > 0 {
            self.read_exact(&mut [0; BLOCK][over..]).map_err(read_error)?;
        }
        Ok(())
    }

    /// Reads what follows the end marker, which counts for the digest.
    fn drain(&mut self) -> Result<(), LayerError> {
        io::copy(self, &mut io::sink()).map(drop).map_err(read_error)
    }
}

impl ExtendedHeader {
    fn add(&mut self, kind: EntryType, text: &[u8]) -> Result<(), LayerError> {
        if kind == EntryType::GNULongName {
            return set_once(&mut self.path, until_nul(text).to_vec());
        }
        if kind == EntryType::GNULongLink {
            return set_once(&mut self.link, until_nul(text).to_vec());
        }
        for (key, value) in parse_records(text)? {
            match key {
                b"path" => set_once(&mut self.path, value.to_vec())?,
                b"linkpath" => set_once(&mut self.link, value.to_vec())?,
                b"size" => set_once(&mut self.size, parse_number(value)?)?,
                b"uid" => set_once(&mut self.uid, parse_number(value)?)?,
                b"gid" => set_once(&mut self.gid, parse_number(value)?)?,
                b"mtime" => set_once(&mut self.mtime, parse_seconds(value)?)?,
                key if key.starts_with(b"GNU.sparse.") => self.is_sparse = true,
                key => {
                    let Some(name) = key.strip_prefix(XATTR_PREFIX) else { continue };
                    if self.xattrs.len() >= XATTRS_MAX {
                        return Err(refused(format!("more than {XATTRS_MAX} attributes of one entry")));
                    }
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

fn bad_extended() -> LayerError {
    refused("invalid extended header")
}

fn set_once<T>(slot: &mut Option<T>, value: T) -> Result<(), LayerError> {
    if slot.replace(value).is_some() { Err(bad_extended()) } else { Ok(()) }
}

fn until_nul(text: &[u8]) -> &[u8] {
    text.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn parse_number(text: &[u8]) -> Result<u64, LayerError> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| digits);
    text.and_then(|text| text.parse().ok()).ok_or_else(bad_extended)
}

/// Parses a time, of which the whole seconds are kept.
fn parse_seconds(text: &[u8]) -> Result<i64, LayerError> {
    let whole = text.split(|byte| *byte == b'.').next().unwrap_or_default();
    std::str::from_utf8(whole).ok().and_then(|text| text.parse().ok()).ok_or_else(bad_extended)
}

/// Key and value.
type PaxRecord<'a> = (&'a [u8], &'a [u8]);

/// Parses the records `LENGTH KEY=VALUE\n` of a PAX header; the length includes the whole record.
fn parse_records(mut text: &[u8]) -> Result<Vec<PaxRecord<'_>>, LayerError> {
    let mut records = Vec::new();
    while !text.is_empty() {
        let space = text.iter().position(|byte| *byte == b' ').ok_or_else(bad_extended)?;
        let length = usize::try_from(parse_number(&text[..space])?).map_err(|_| bad_extended())?;
        if length <= space + 1 || length > text.len() {
            return Err(bad_extended());
        }
        let (record, rest) = text.split_at(length);
        let record = record[space + 1..].strip_suffix(b"\n").ok_or_else(bad_extended)?;
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(bad_extended)?;
        records.push((&record[..equals], &record[equals + 1..]));
        text = rest;
    }
    Ok(records)
}
