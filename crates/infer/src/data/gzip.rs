//! Gzip as `gzip` reads it: members follow each other, zeros may fill the end, and other bytes there are told, not
//! fatal.

use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

use super::input::Input;
use super::notes::Note;

/// The bytes with which a member begins.
const MEMBER: [u8; 2] = [0x1f, 0x8b];

/// The content of all members.
pub(super) struct Members<'a, R> {
    /// The member that is read; none between members and at the end.
    member: Option<GzDecoder<R>>,
    input: Input<'a>,
}

impl<'a, R: BufRead> Members<'a, R> {
    /// Reads `reader`, which stands at a member.
    pub(super) fn new(reader: R, input: Input<'a>) -> Self {
        Self { member: Some(GzDecoder::new(reader)), input }
    }

    /// Goes from the end of a member to the next one, if there is one.
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
        // The second byte may not be there yet where the buffer ends; the decoder says so if it is wrong.
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
