//! Sample files: what is read, and what is refused with which words.

use rfdescent::estimation::{Sample, read_samples};

fn read(content: &str) -> Result<Vec<Sample>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("samples.csv");
    std::fs::write(&path, content).unwrap();
    read_samples(&path).map_err(|error| {
        let error = error.to_string();
        assert!(error.contains("samples.csv"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        error
    })
}

const SAMPLE: Sample = Sample { loss: -2.5, sq_grad_norm: 9.0, batch_size: 20 };

#[test]
fn columns_in_any_order_and_company() {
    for content in [
        "loss,grad_norm,batchsize,time\n-2.5,3,20,17.5\n",
        "time, batchsize ,grad_norm,loss\n,20,3.0,-2.5\n",
        "seed,loss,grad_norm,batchsize,note\n1,-2.5,-0.0003e4,20,\"a, b\"\n"
            .replace("-0.0003e4", "0.0003e4")
            .as_str(),
        "loss,grad_norm,batchsize,time\r\n-2.5,3,20,17.5\r\n",
        // The squared norm wins where both are there.
        "loss,grad_norm,sq_grad_norm,batchsize\n-2.5,17,9,20\n",
        "loss,sq_grad_norm,batchsize\n-2.5,9,20\n",
        // No line break at the end: the cut could only have hit a column that nothing needs.
        "loss,grad_norm,batchsize,time\n-2.5,3,20,17.5",
    ] {
        assert_eq!(read(content), Ok(vec![SAMPLE]), "{content}");
    }
    assert_eq!(read("loss,grad_norm,batchsize,time\n"), Ok(vec![]));
}

#[test]
fn errors_name_row_and_column() {
    let head = "loss,grad_norm,batchsize,time\n1,1,20,0\n";
    for (row, words) in [
        ("nan,1,20,0\n", ["row 3", "`loss`"]),
        ("inf,1,20,0\n", ["row 3", "`loss`"]),
        ("x,1,20,0\n", ["row 3", "`loss`"]),
        (",1,20,0\n", ["row 3", "`loss`"]),
        ("1,-1,20,0\n", ["row 3", "`grad_norm`"]),
        ("1,NaN,20,0\n", ["row 3", "`grad_norm`"]),
        ("1,1e300,20,0\n", ["row 3", "finite"]),
        ("1,1,0,0\n", ["row 3", "`batchsize`"]),
        ("1,1,-5,0\n", ["row 3", "`batchsize`"]),
        ("1,1,20.5,0\n", ["row 3", "`batchsize`"]),
        ("1,1,20\n", ["row 3", "3 fields"]),
        ("1,1,20,0,7\n", ["row 3", "5 fields"]),
        ("1,1,2", ["row 3", "3 fields"]),
        ("1,1,20,0\n1,1", ["row 4", "2 fields"]),
    ] {
        let error = read(&format!("{head}{row}")).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{row}: {error}");
    }
    // A cut-off batch size is a batch size as well.
    let error = read("loss,grad_norm,batchsize\n1,1,20\n1,1,10").unwrap_err();
    assert!(error.contains("row 3") && error.contains("cut off"), "{error}");

    for (content, word) in [
        ("", "header"),
        ("loss,batchsize\n1,1\n", "grad_norm"),
        ("grad_norm,batchsize\n1,1\n", "`loss`"),
        ("loss,grad_norm\n1,1\n", "batchsize"),
        ("1,1,20,0\n1,1,20,0\n", "header"),
    ] {
        let error = read(content).unwrap_err();
        assert!(error.contains(word) && error.contains("row 1"), "{content}: {error}");
    }
}

#[test]
fn files_that_are_not_text_or_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("binary.csv");
    std::fs::write(&path, b"loss,grad_norm,batchsize,time\n\xff\xfe,1,20,0\n").unwrap();
    let error = read_samples(&path).unwrap_err().to_string();
    assert!(error.contains("row 2") && error.contains("UTF-8"), "{error}");
    assert!(read_samples(&folder.path().join("none.csv")).unwrap_err().to_string().contains("none.csv"));
}
