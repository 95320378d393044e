//! Strict reader of the archive: one header after the other.

use std::{
    io::{self, Read},
    os::fd::AsFd,
};

use tar::{EntryType, Header};

use super::{
    ArchiveError, ArchiveLimits, MAX_EXTENDED, Summary, TopLevel, UnpackError, entry_name, escape_name,
    extract::{EntryMeta, TargetTree},
};

const BLOCK: usize = 512;

/// Values from extended headers for the entry that follows them.
#[derive(Default)]
struct ExtendedHeader {
    any: bool,
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// Unpacks the archive, `length` bytes long, below `dir`. After an error the directory holds what was created until
/// then, for the caller to remove.
pub fn unpack(
    archive: impl Read,
    length: u64,
    dir: impl AsFd,
    top: TopLevel,
    limits: &ArchiveLimits,
) -> Result<Summary, UnpackError> {
    let mut walk = ArchiveReader {
        archive,
        left: length,
        limits: *limits,
        top,
        summary: Summary::default(),
        tree: TargetTree::new(dir.as_fd(), top)?,
    };
    let mut extended = ExtendedHeader::default();
    while let Some(block) = walk.header()? {
        walk.entry(Header::from_byte_slice(&block), &mut extended)?;
        // Directories without an entry cost as much as those that have one.
        if walk.summary.entries + walk.tree.implied > limits.entries {
            return Err(ArchiveError::TooManyEntries { limit: limits.entries }.into());
        }
    }
    if extended.any {
        return Err(ArchiveError::Truncated.into());
    }
    if top == TopLevel::Rename && !walk.tree.has_content() {
        return Err(ArchiveError::Empty.into());
    }
    walk.tree.finish()?;
    Ok(walk.summary)
}

struct ArchiveReader<'a, R> {
    archive: R,
    left: u64,
    limits: ArchiveLimits,
    top: TopLevel,
    summary: Summary,
    tree: TargetTree<'a>,
}

impl<R: Read> ArchiveReader<'_, R> {
    /// Reads the next header. Returns `None` at the end marker.
    fn header(&mut self) -> Result<Option<[u8; BLOCK]>, UnpackError> {
        let mut block = [0; BLOCK];
        self.fill(&mut block)?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let header = Header::from_byte_slice(&block);
        let sum: u32 = block[..148].iter().chain(&block[156..]).map(|byte| u32::from(*byte)).sum();
        if header.cksum().ok() != Some(sum + 8 * u32::from(b' ')) {
            return Err(ArchiveError::BadHeader.into());
        }
        self.summary.entries += 1;
        if self.summary.entries > self.limits.entries {
            return Err(ArchiveError::TooManyEntries { limit: self.limits.entries }.into());
        }
        Ok(Some(block))
    }

    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "every kind this does not name is refused, those to come as well"
    )]
    fn entry(&mut self, header: &Header, extended: &mut ExtendedHeader) -> Result<(), UnpackError> {
        let size = header.entry_size().map_err(|_| ArchiveError::BadHeader)?;
        let kind = header.entry_type();
        if matches!(kind, EntryType::XHeader | EntryType::GNULongName | EntryType::GNULongLink) {
            extended.any = true;
            let text = self.extended(size)?;
            return extended.take(kind, &text).map_err(Into::into);
        }
        if kind == EntryType::XGlobalHeader {
            return check_global_header(&self.extended(size)?).map_err(Into::into);
        }
        let message = std::mem::take(extended);
        let name = message.path.unwrap_or_else(|| header.path_bytes().into_owned());
        let entry = || escape_name(&name);
        if message.sparse {
            return Err(ArchiveError::Sparse { entry: entry() }.into());
        }
        if message.size.is_some_and(|reported| reported != size) {
            return Err(ArchiveError::Mismatch { entry: entry(), what: "the size" }.into());
        }
        if kind != EntryType::Regular && size != 0 {
            check_kind(kind, &name)?;
            return Err(ArchiveError::Mismatch { entry: entry(), what: "the size" }.into());
        }
        let parts = entry_name::split_path(&name, self.top, &self.limits)?;
        let link = message
            .link
            .or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned))
            .unwrap_or_default();
        let meta = EntryMeta {
            shown: &entry(),
            mode: header.mode().map_err(|_| ArchiveError::BadHeader)?,
            mtime: header.mtime().unwrap_or(0),
        };
        match kind {
            EntryType::Regular => self.unpack_file(&name, &parts, &meta, size),
            EntryType::Directory => self.tree.add_directory(&parts, &meta),
            EntryType::Symlink if entry_name::is_link_inside(&parts, &link) => {
                self.tree.add_symlink(&parts, &meta, &link)
            }
            EntryType::Symlink => {
                Err(ArchiveError::LinkOut { entry: entry(), target: escape_name(&link) }.into())
            }
            EntryType::Link => {
                let bad = || ArchiveError::BadHardLink { entry: entry(), target: escape_name(&link) };
                let target = entry_name::split_path(&link, self.top, &self.limits).map_err(|_| bad())?;
                self.tree.add_hard_link(&parts, &meta, &target, bad)
            }
            other => check_kind(other, &name).map_err(Into::into),
        }
    }

    fn unpack_file(
        &mut self,
        name: &[u8],
        parts: &entry_name::PathParts<'_>,
        meta: &EntryMeta<'_>,
        size: u64,
    ) -> Result<(), UnpackError> {
        if name.ends_with(b"/") {
            return Err(ArchiveError::Mismatch {
                entry: escape_name(name),
                what: "whether it is a directory",
            }
            .into());
        }
        if size > self.left {
            return Err(ArchiveError::MoreThanArchive {
                entry: escape_name(name),
                claimed: size,
                left: self.left,
            }
            .into());
        }
        self.summary.bytes = self.summary.bytes.saturating_add(size);
        if self.summary.bytes > self.limits.bytes {
            return Err(ArchiveError::TooManyBytes { limit: self.limits.bytes }.into());
        }
        self.tree.file(parts, meta, &mut (&mut self.archive).take(size), size)?;
        self.left -= size;
        self.skip_padding(size)
    }

    /// Reads the text of an extended header.
    fn extended(&mut self, size: u64) -> Result<Vec<u8>, UnpackError> {
        if size > MAX_EXTENDED {
            return Err(ArchiveError::ExtendedTooLong { size }.into());
        }
        let mut text = vec![0; usize::try_from(size).map_err(|_| ArchiveError::ExtendedTooLong { size })?];
        self.fill(&mut text)?;
        self.skip_padding(size)?;
        Ok(text)
    }

    /// Skips the padding to a whole block after contents.
    fn skip_padding(&mut self, size: u64) -> Result<(), UnpackError> {
        let over = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        if over > 0 {
            self.fill(&mut [0; BLOCK][over..])?;
        }
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), UnpackError> {
        self.left = self.left.checked_sub(buffer.len() as u64).ok_or(ArchiveError::Truncated)?;
        self.archive.read_exact(buffer).map_err(|error| {
            if error.kind() == io::ErrorKind::UnexpectedEof {
                ArchiveError::Truncated.into()
            } else {
                UnpackError::Read(error)
            }
        })
    }
}

impl ExtendedHeader {
    fn take(&mut self, kind: EntryType, text: &[u8]) -> Result<(), ArchiveError> {
        if kind == EntryType::GNULongName {
            return set_once(&mut self.path, until_nul(text).to_vec());
        }
        if kind == EntryType::GNULongLink {
            return set_once(&mut self.link, until_nul(text).to_vec());
        }
        for record in parse_records(text)? {
            match record {
                (b"path", value) => set_once(&mut self.path, value.to_vec())?,
                (b"linkpath", value) => set_once(&mut self.link, value.to_vec())?,
                (b"size", value) => set_once(&mut self.size, parse_number(value)?)?,
                (key, _) if key.starts_with(b"GNU.sparse.") => self.sparse = true,
                _ => {}
            }
        }
        Ok(())
    }
}

fn set_once<T>(slot: &mut Option<T>, value: T) -> Result<(), ArchiveError> {
    if slot.replace(value).is_some() { Err(ArchiveError::BadExtended) } else { Ok(()) }
}

fn until_nul(text: &[u8]) -> &[u8] {
    text.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn parse_number(text: &[u8]) -> Result<u64, ArchiveError> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| digits);
    text.and_then(|text| text.parse().ok()).ok_or(ArchiveError::BadExtended)
}

/// Key and value.
type PaxRecord<'a> = (&'a [u8], &'a [u8]);

/// Parses the records `LENGTH KEY=VALUE\n` of a PAX header; the length includes the whole record.
fn parse_records(mut text: &[u8]) -> Result<Vec<PaxRecord<'_>>, ArchiveError> {
    let mut records = Vec::new();
    while !text.is_empty() {
        let space = text.iter().position(|byte| *byte == b' ').ok_or(ArchiveError::BadExtended)?;
        let length = usize::try_from(parse_number(&text[..space])?).map_err(|_| ArchiveError::BadExtended)?;
        if length <= space + 1 || length > text.len() {
            return Err(ArchiveError::BadExtended);
        }
        let (record, rest) = text.split_at(length);
        let record = record[space + 1..].strip_suffix(b"\n").ok_or(ArchiveError::BadExtended)?;
        let equals = record.iter().position(|byte| *byte == b'=').ok_or(ArchiveError::BadExtended)?;
        records.push((&record[..equals], &record[equals + 1..]));
        text = rest;
    }
    Ok(records)
}

/// Checks a header for all entries. It may contain what is ignored (a comment), but not change the entries.
fn check_global_header(text: &[u8]) -> Result<(), ArchiveError> {
    let changes = |key: &[u8]| matches!(key, b"path" | b"linkpath" | b"size") || key.starts_with(b"GNU.");
    if parse_records(text)?.iter().any(|(key, _)| changes(key)) {
        Err(ArchiveError::BadExtended)
    } else {
        Ok(())
    }
}

/// Refuses everything but files, directories and links, each with its own error.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "every kind this does not name is refused, those to come as well"
)]
fn check_kind(kind: EntryType, name: &[u8]) -> Result<(), ArchiveError> {
    let entry = escape_name(name);
    Err(match kind {
        EntryType::Regular | EntryType::Directory | EntryType::Symlink | EntryType::Link => return Ok(()),
        EntryType::Block | EntryType::Char => ArchiveError::Device { entry },
        EntryType::Fifo => ArchiveError::Fifo { entry },
        EntryType::GNUSparse => ArchiveError::Sparse { entry },
        other => ArchiveError::UnknownKind { entry, kind: other.as_byte().escape_ascii().to_string() },
    })
}
