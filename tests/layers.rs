//! Which part of the library may know which other, read from its sources: a backend sees slices, addresses
//! and plain scalars, covariance and estimation see no step, and what is unsafe or belongs to one method
//! stands in few places.

use std::fs;
use std::path::{Path, PathBuf};

/// What the code in some places must not name.
const LAYERS: [(&str, &[&str]); 9] = [
    ("src/backend", &["optimizer", "covariance", "estimation"]),
    ("src/covariance", &["optimizer", "backend"]),
    ("src/estimation", &["optimizer", "backend"]),
    ("src/numeric.rs", &["optimizer", "backend", "covariance", "estimation"]),
    // How chunks lie is a number of the kernels.
    ("src/rows.rs", &["optimizer", "covariance", "estimation"]),
    ("src/tensor.rs", &["optimizer", "backend", "covariance", "estimation"]),
    // The one error type wraps that of estimation.
    ("src/error.rs", &["optimizer", "backend", "covariance"]),
    ("src/moments.rs", &["optimizer", "backend", "covariance", "estimation"]),
    ("src/files.rs", &["optimizer", "backend", "covariance", "estimation"]),
];

/// What only the code in some places may name, all of which do.
const CONFINED: [(&str, &[&str]); 4] = [
    ("cudarc", &["src/backend/cuda"]),
    ("unsafe", &["src/backend", "src/optimizer/device", "src/optimizer/any"]),
    ("Method::Fitted", &["src/optimizer/method"]),
    ("Method::Adaptive", &["src/optimizer/method"]),
];

#[test]
fn layers_know_only_those_below() {
    let sources = sources();
    let mut found = Vec::new();
    for (place, words) in LAYERS {
        let own: Vec<_> = sources.iter().filter(|source| source.path.starts_with(place)).collect();
        assert!(!own.is_empty(), "{place} is gone: change the list");
        for word in words {
            found.extend(own.iter().flat_map(|source| source.uses(word)));
        }
    }
    assert!(found.is_empty(), "must not be named there:\n{}", found.join("\n"));
}

#[test]
fn some_words_stand_in_few_places() {
    let sources = sources();
    let mut found = Vec::new();
    for (word, places) in CONFINED {
        for place in places {
            let used = sources.iter().any(|s| s.path.starts_with(place) && !s.uses(word).is_empty());
            assert!(used, "{place} names no `{word}` any more: change the list");
        }
        let elsewhere =
            sources.iter().filter(|source| !places.iter().any(|place| source.path.starts_with(place)));
        found.extend(elsewhere.flat_map(|source| source.uses(word)));
    }
    assert!(found.is_empty(), "must not be named there:\n{}", found.join("\n"));
}

#[test]
fn comments_and_strings_are_no_code() {
    let text = r##"
        //! unsafe
        /* unsafe /* unsafe */ unsafe */ let quote = ('"', b'"', '\"', '\'', "\"unsafe", r"unsafe");
        let raw = br#"unsafe " unsafe"#; // unsafe
        fn f<'a>(x: &'a str) -> Method :: Fitted { unsafe_f() }
        use crate::{optimizer, tensor};
        unsafe {}
    "##;
    let source = Source { path: "x.rs".into(), tokens: tokens(text) };
    assert_eq!(source.uses("unsafe"), ["x.rs:7: unsafe"]);
    assert_eq!(source.uses("Method::Fitted"), ["x.rs:5: Method::Fitted"]);
    assert_eq!(source.uses("optimizer"), ["x.rs:6: optimizer"]);
}

struct Source {
    /// From the package's folder on.
    path: PathBuf,
    tokens: Vec<(usize, String)>,
}

impl Source {
    /// Where a word or path stands in the code.
    fn uses(&self, word: &str) -> Vec<String> {
        let wanted = tokens(word);
        (self.tokens.windows(wanted.len()))
            .filter(|window| window.iter().zip(&wanted).all(|(token, wanted)| token.1 == wanted.1))
            .map(|window| format!("{}:{}: {word}", self.path.display(), window[0].0))
            .collect()
    }
}

fn sources() -> Vec<Source> {
    fn collect(folder: &Path, root: &Path, sources: &mut Vec<Source>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, root, sources);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let tokens = tokens(&fs::read_to_string(&path).unwrap());
                sources.push(Source { path: path.strip_prefix(root).unwrap().into(), tokens });
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    collect(&root.join("src"), root, &mut sources);
    sources
}

/// The words and signs of a program, with their lines; without comments and literals in quotes.
fn tokens(text: &str) -> Vec<(usize, String)> {
    let chars: Vec<char> = text.chars().collect();
    let starts_with =
        |at: usize, pattern: &str| pattern.chars().eq(chars[at..].iter().copied().take(pattern.len()));
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while at < chars.len() {
        let end = if starts_with(at, "//") {
            (at..chars.len()).find(|&k| chars[k] == '\n').unwrap_or(chars.len())
        } else if starts_with(at, "/*") {
            let (mut depth, mut k) = (1, at + 2);
            while depth > 0 && k < chars.len() {
                match (starts_with(k, "/*"), starts_with(k, "*/")) {
                    (true, _) => (depth, k) = (depth + 1, k + 2),
                    (_, true) => (depth, k) = (depth - 1, k + 2),
                    _ => k += 1,
                }
            }
            k
        } else if chars[at] == '"' {
            let mut k = at + 1;
            while k < chars.len() && chars[k] != '"' {
                k += if chars[k] == '\\' { 2 } else { 1 };
            }
            k + 1
        } else if let Some(quote) = raw_quote(&chars[at..]) {
            let signs = chars[at..at + quote].iter().filter(|&&c| c == '#');
            let close: String = std::iter::once(&'"').chain(signs).collect();
            let first = at + quote + 1;
            (first..chars.len()).find(|&k| starts_with(k, &close)).unwrap_or(chars.len()) + close.len()
        } else if chars[at] == '\'' && chars.get(at + 1) == Some(&'\\') {
            (at + 3..chars.len()).find(|&k| chars[k] == '\'').unwrap_or(chars.len()) + 1
        } else if chars[at] == '\'' && chars.get(at + 2) == Some(&'\'') {
            at + 3
        } else {
            let word = (at..chars.len()).find(|&k| !is_word(chars[k])).unwrap_or(chars.len());
            let end = word.max(at + 1);
            if !chars[at].is_whitespace() {
                tokens.push((line, chars[at..end].iter().collect()));
            }
            end
        };
        let end = end.min(chars.len());
        line += chars[at..end].iter().filter(|&&c| c == '\n').count();
        at = end;
    }
    tokens
}

/// Where the quote of a raw string that begins here is, after `r` or `br` and the signs `#`.
fn raw_quote(chars: &[char]) -> Option<usize> {
    let r = usize::from(chars.first() == Some(&'b'));
    if chars.get(r) != Some(&'r') {
        return None;
    }
    let quote = r + 1 + chars[r + 1..].iter().take_while(|&&c| c == '#').count();
    (chars.get(quote) == Some(&'"')).then_some(quote)
}
