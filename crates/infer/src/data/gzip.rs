//! Gzip as the `gzip` program reads it: several members, zeros at the end, and a warning for other trailing bytes.

use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

use super::input::Input;
use super::notes::Note;

/// The magic bytes of a member.
const MEMBER: [u8; 2] = [0x1f, 0x8b];

/// A reader of the content of all members.
pub(super) struct Members<'a, R> {
    /// The current member; `None` between members and at the end.
    member: Option<GzDecoder<R>>,
    input: Input<'a>,
}

impl<'a, R: BufRead> Members<'a, R> {
    /// Reads `reader`, which is at the start of a member.
    pub(super) fn new(reader: R, input: Input<'a>) -> Self {
        Self { member: Some(GzDecoder::new(reader)), input }
    }

    /// Goes on to the next member, if there is one.
    fn advance(&mut self) -> io::Result<()> {
        let Some(member) = self.member.take() else { return Ok(()) };
        let mut reader = member.into_inner();
        loop {
            let available = reader.fill_buf()?;
            if available.is_empty() {
                return Ok(());
            }
            let zeros = available.iter().position(|&byte| byte != 0).unwrap_or(available.len());
            if zeros == 0 {
                break;
            }
            reader.consume(zeros);
        }
        // The second byte may be missing at the end of the buffer; the decoder reports it if it is wrong.
        let starts = reader.fill_buf()?;
        let is_member = starts.iter().zip(MEMBER).all(|(byte, expected)| *byte == expected);
        if is_member {
            self.member = Some(GzDecoder::new(reader));
        } else {
            self.input.note(Note::Trailing, String::new);
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Members<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let count = member.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            self.advance()?;
        }
        Ok(0)
    }
}
