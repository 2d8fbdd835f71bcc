//! CSV as people's tools write it: which character separates the fields, which line names the columns and
//! which column is meant by a name. Public for the command line alone, and no part of the interface.

/// What starts a line that is no row.
const COMMENT: u8 = b'#';

/// Characters that may separate fields; of equally good ones the first is taken.
const SEPARATORS: [u8; 3] = [b',', b';', b'\t'];

/// As many columns are listed in a message.
const MOST_LISTED: usize = 12;

/// Where the header is, and what separates fields.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Between fields, in the header and in each row.
    pub separator: u8,
    /// The columns, as they are called in the file.
    pub names: Vec<String>,
    /// The line of the header, from 1.
    pub row: usize,
    /// Whether the header's own line break is there.
    pub ended: bool,
    /// Whether the header is a comment, as numpy writes it: the first record is a row then.
    commented: bool,
}

impl Layout {
    /// The layout whose header has most of the columns that a reader wants; none for a file without a header.
    /// A header is the first line that is neither blank nor a comment, or else a comment before it that names
    /// all that is wanted.
    ///
    /// # Errors
    /// The reader's own, for a header that is no text.
    pub fn find(content: &[u8], wanted: &[&[&str]]) -> csv::Result<Option<Self>> {
        let score =
            |layout: &Layout| wanted.iter().filter(|names| names.iter().any(|name| layout.has(name))).count();
        let mut best: Option<(usize, Layout)> = None;
        for separator in SEPARATORS {
            for layout in Self::candidates(content, separator)? {
                let found = score(&layout);
                let better = best.as_ref().is_none_or(|(most, _)| found > *most);
                if better && (!layout.commented || found == wanted.len()) {
                    best = Some((found, layout));
                }
            }
        }
        Ok(best.map(|(_, layout)| layout))
    }

    fn candidates(content: &[u8], separator: u8) -> csv::Result<Vec<Self>> {
        let mut reader = builder(separator).has_headers(true).from_reader(without_last_comment(content));
        let header = reader.headers()?.clone();
        if header.is_empty() {
            return Ok(Vec::new());
        }
        let start = header.position().map_or(0, csv::Position::byte);
        let layout = |header: &csv::StringRecord, row: usize, commented: bool| Layout {
            separator,
            names: header.iter().map(|name| name.trim().to_string()).collect(),
            row,
            ended: commented || reader.position().byte() as usize <= whole(content),
            commented,
        };
        let row = row_at(content, start);
        let mut found = vec![layout(&header, row, false)];
        // The nearest comment first: the others may speak of columns too.
        for (number, line) in rows(content).take(row - 1).enumerate().collect::<Vec<_>>().into_iter().rev() {
            let Some(text) = comment(line) else { continue };
            let mut reader = builder(separator).has_headers(true).comment(None).from_reader(text);
            if let Ok(header) = reader.headers() {
                found.push(layout(header, number + 1, true));
            }
        }
        Ok(found)
    }

    /// A reader of the rows.
    pub fn reader<'a>(&self, content: &'a [u8]) -> csv::Reader<&'a [u8]> {
        let mut reader =
            builder(self.separator).has_headers(!self.commented).from_reader(without_last_comment(content));
        if !self.commented {
            // Else errors in the first row would have the header's position. Its own errors are known.
            let _ = reader.headers();
        }
        reader
    }

    /// A comment as the row that it would be if nothing marked comments.
    pub fn row_in_comment(&self, line: &[u8]) -> Option<csv::StringRecord> {
        comment(line)?;
        let mut reader = builder(self.separator).has_headers(false).comment(None).from_reader(line);
        let mut record = csv::StringRecord::new();
        matches!(reader.read_record(&mut record), Ok(true)).then_some(record)
    }

    /// The column of that name. Case, `_`, `-` and blanks count only where several columns differ in nothing
    /// else.
    ///
    /// # Errors
    /// Names the columns of which each may be meant.
    pub fn column(&self, wanted: &str) -> Result<Option<usize>, String> {
        let matching = |same: fn(&str, &str) -> bool| -> Vec<usize> {
            (0..self.names.len()).filter(|&k| same(&self.names[k], wanted)).collect()
        };
        let (exact, alike) = (matching(|name, wanted| name == wanted), matching(same_name));
        match (&exact[..], &alike[..]) {
            (&[column], _) | (_, &[column]) => Ok(Some(column)),
            ([], []) => Ok(None),
            ([], alike) => {
                let names: Vec<_> = alike.iter().map(|&k| format!("`{}`", self.names[k])).collect();
                Err(format!(
                    "row {} has columns {} for `{wanted}`: rename or delete all but one",
                    self.row,
                    names.join(" and ")
                ))
            }
            _ => Err(format!(
                "row {} names column `{wanted}` more than once: rename or delete all but one",
                self.row
            )),
        }
    }

    fn has(&self, wanted: &str) -> bool {
        self.names.iter().any(|name| same_name(name, wanted))
    }

    /// The columns that were seen, for a message.
    pub fn listed(&self) -> String {
        let first: Vec<_> = self.names.iter().take(MOST_LISTED).map(|name| format!("`{name}`")).collect();
        let more = self.names.len() - first.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        first.join(", ") + &more
    }
}

/// csv makes a row of a comment that ends without a line break.
fn without_last_comment(content: &[u8]) -> &[u8] {
    let end = whole(content);
    if comment(&content[end..]).is_some() { &content[..end] } else { content }
}

fn builder(separator: u8) -> csv::ReaderBuilder {
    let mut builder = csv::ReaderBuilder::new();
    builder.delimiter(separator).comment(Some(COMMENT)).flexible(true);
    builder
}

/// Whether two names of columns differ in case, `_`, `-` and blanks at most.
pub fn same_name(one: &str, other: &str) -> bool {
    let letters = |name: &'_ str| -> Vec<char> {
        name.chars().filter(|c| !matches!(c, '_' | '-' | ' ')).flat_map(char::to_lowercase).collect()
    };
    letters(one) == letters(other)
}

/// A whole number, also where a tool wrote it with a point or an exponent: `16.0`, `1.6e+01`.
///
/// # Errors
/// What is wrong with the text, to be put behind it.
pub fn whole_number(text: &str) -> Result<u64, &'static str> {
    // Below it every whole number has a float of its own, so that none is rounded.
    const EXACT: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;
    const NOT_WHOLE: &str = "is not a whole number";
    match (text.parse::<u64>(), text.parse::<f64>()) {
        (Ok(number), _) => Ok(number),
        (_, Ok(number)) if number < 0.0 || number.fract() != 0.0 => Err(NOT_WHOLE),
        (_, Ok(number)) if number < EXACT => Ok(number as u64),
        (_, Ok(number)) if number < u64::MAX as f64 => Err("may be rounded: write all of its digits"),
        (_, Ok(_)) => Err("is too large"),
        _ => Err(NOT_WHOLE),
    }
}

/// What may have gone wrong with a text that is not a number.
pub fn not_a_number(text: &str) -> &'static str {
    let point = text.replace(',', ".");
    match text.contains(',') && point.parse::<f64>().is_ok() {
        true => "is not a number: write a decimal point",
        false => "is not a number",
    }
}

/// Why a content cannot be read, and where.
pub fn not_text(content: &[u8], error: &csv::Error) -> String {
    match (content, error.position()) {
        ([0x1f, 0x8b, ..], _) => "compressed with gzip: unpack it with gzip -d".into(),
        ([0xff, 0xfe, ..] | [0xfe, 0xff, ..], _) => "text in UTF-16: save it as UTF-8".into(),
        (_, Some(at)) => format!("row {}: not a CSV text file in UTF-8", row_at(content, at.byte())),
        (_, None) => "not a CSV text file in UTF-8".into(),
    }
}

pub(crate) fn is_break(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// The length of all lines that end with a line break.
pub(crate) fn whole(content: &[u8]) -> usize {
    content.iter().rposition(|&byte| is_break(byte)).map_or(0, |last| last + 1)
}

/// What follows the mark of a comment; none for another line.
pub(crate) fn comment(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(&[COMMENT])
}

/// The lines of a file, split at each of the three usual line breaks.
pub(crate) fn rows(content: &[u8]) -> impl Iterator<Item = &[u8]> {
    content
        .split_inclusive(|&byte| byte == b'\n')
        .map(|line| line.strip_suffix(b"\n").unwrap_or(line))
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .flat_map(|line| line.split(|&byte| byte == b'\r'))
}

/// The number, from 1, of the row that a record starting at this byte stands in. What the reader skips before
/// it, line breaks and comments, counts as its start.
pub fn row_at(content: &[u8], start: u64) -> usize {
    rows(&content[..content.len().min(first_byte(content, start) + 1)]).count().max(1)
}

/// The same of many records, in one pass over the content.
pub(crate) fn rows_at(content: &[u8], starts: &[u64]) -> Vec<u64> {
    let firsts: Vec<usize> =
        rows(content).map(|line| line.as_ptr().addr() - content.as_ptr().addr()).collect();
    let row =
        |&start: &u64| firsts.partition_point(|&first| first <= first_byte(content, start)).max(1) as u64;
    starts.iter().map(row).collect()
}

/// Where a record begins that the reader says to start at this byte.
fn first_byte(content: &[u8], start: u64) -> usize {
    let mut start = content.len().min(start as usize);
    while let Some(&byte) = content.get(start) {
        if byte == COMMENT {
            start += content[start..].iter().take_while(|&&byte| !is_break(byte)).count();
        } else if is_break(byte) {
            start += 1;
        } else {
            break;
        }
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_as_tools_write_them() {
        for (text, number) in [
            ("16", 16),
            ("16.0", 16),
            ("16.", 16),
            ("+16", 16),
            ("1.6e+01", 16),
            ("1.600000000000000000e+01", 16),
            ("1e4", 10_000),
            ("1E4", 10_000),
            ("160e-1", 16),
            ("0", 0),
            ("9007199254740991.0", (1 << 53) - 1),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(whole_number(text), Ok(number), "{text}");
        }
        for (text, said) in [
            ("16.5", "not a whole"),
            ("-16", "not a whole"),
            ("nan", "not a whole"),
            ("", "not a whole"),
            ("1,000", "not a whole"),
            ("0x10", "not a whole"),
            ("9007199254740993.0", "all of its digits"),
            ("1e300", "too large"),
            ("inf", "not a whole"),
        ] {
            let error = whole_number(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn rows_are_counted_with_what_the_reader_skips() {
        let content = b"# a\n\nhead\r\n# b\r\n\r\n1\r2\n";
        for (start, row) in [(0, 3), (9, 6), (10, 6), (21, 7)] {
            assert_eq!(row_at(content, start), row, "{start}");
            assert_eq!(rows_at(content, &[start]), [row as u64], "{start}");
        }
        assert_eq!(row_at(b"", 0), 1);
    }
}
