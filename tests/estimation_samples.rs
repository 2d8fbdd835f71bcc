//! Sample files: what is read, and what is refused with which words.

use rfdescent::estimation::{Sample, SampleTable, read_samples};

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
        "loss,grad_norm,batchsize,time\r-2.5,3,20,17.5\r",
        // Quotes within a field that has none around it mean nothing, and doubled ones one.
        "loss,grad_norm,batchsize,note\n-2.5,3,20,5\" wide\n",
        "loss,grad_norm,batchsize,note\n-2.5,3,20,\"5\"\" wide\"\n",
        "\u{feff}loss,grad_norm,batchsize,time\n\n-2.5,3,20,17.5\n",
        // Columns that nothing needs may share a name.
        "loss,grad_norm,batchsize,note,note\n-2.5,3,20,a,b\n",
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

/// What tools write, one row for each: it says what [`SAMPLE`] is, or the words of the error.
#[test]
fn files_as_tools_write_them() {
    for content in [
        // Batch sizes as floats: pandas with a gap in the column, C, numpy, by hand.
        "loss,grad_norm,batchsize\n-2.5,3,20.0\n",
        "loss,grad_norm,batchsize\n-2.5,3,20.\n",
        "loss,grad_norm,batchsize\n-2.5,3,2.0e+01\n",
        "loss,grad_norm,batchsize\n-2.5,3,2e1\n",
        "loss,grad_norm,batchsize\n-2.5,3,2E1\n",
        "loss,grad_norm,batchsize\n-2.5,3,\"20.0\"\n",
        // Separators.
        "loss;grad_norm;batchsize\n-2.5;3;20\n",
        "loss\tgrad_norm\tbatchsize\n-2.5\t3\t20\n",
        "loss;grad_norm;batchsize;note\n-2.5;3;20;\"a; b\"\n",
        "loss;grad_norm;batchsize;note, free\n-2.5;3;20;a, \"b\n",
        // Spellings.
        "Loss,Grad_Norm,BatchSize\n-2.5,3,20\n",
        "LOSS,GRAD_NORM,BATCH_SIZE\n-2.5,3,20\n",
        "loss,grad-norm,batch-size\n-2.5,3,20\n",
        "loss,gradNorm,batch size\n-2.5,3,20\n",
        "Loss;SqGradNorm;Batch_Size\r\n-2.5;9;20.0\r\n",
        // The exact name is meant where both are there.
        "Loss,loss,grad_norm,batchsize,batch_size\n7,-2.5,3,20,x\n",
        // The index column of pandas.
        ",loss,grad_norm,batchsize\n0,-2.5,3,20.0\n",
        // Comments, before and behind the header, with quotes, empty, at the end without a line break.
        "# run 7, \"lr\nloss,grad_norm,batchsize\n#\n# seed 3\n-2.5,3,20\n# end",
        "#\r\nloss,grad_norm,batchsize\r\n# seed 3\r\n-2.5,3,20\r\n",
        // numpy.savetxt with a header.
        "# loss,grad_norm,batchsize\n-2.500000000000000000e+00,3.000000000000000000e+00,2.000000000000000000e+01\n",
        "#seed 3\n#loss;grad_norm;batchsize\n-2.5;3;2e+01\n",
    ] {
        assert_eq!(read(content), Ok(vec![SAMPLE]), "{content}");
    }
    for (content, words) in [
        ("loss,grad_norm,batchsize\n1,1,20.5\n", &["row 2", "`batchsize`: `20.5` is not a whole number"][..]),
        ("loss,grad_norm,batchsize\n1,1,0.0\n", &["row 2", "`0.0` is too small", "at least 1"]),
        ("loss,grad_norm,batchsize\n1,1,9007199254740993.0\n", &["row 2", "all of its digits"]),
        ("loss;grad_norm;batchsize\n1,5;1;20\n", &["row 2", "`loss`: `1,5`", "decimal point"]),
        ("loss grad_norm batchsize\n1 1 20\n", &["row 1", "no column `", "`loss grad_norm batchsize`"]),
        ("loss,grad_norm,n\n1,1,20\n", &["row 1", "no column `batchsize`", "`loss`, `grad_norm`, `n`"]),
        (
            "Batch_Size,BATCHSIZE,loss,grad_norm\n1,1,1,1\n",
            &["row 1", "`Batch_Size` and `BATCHSIZE`", "rename"],
        ),
        ("loss;grad_norm;batchsize\n1,1,20\n", &["row 2", "1 fields where the header has 3"]),
        ("# a\n\nloss,grad_norm,batchsize\n# b\n1,x,20\n", &["row 5", "`grad_norm`"]),
        ("# a\nloss,grad_norm\n1,1\n", &["row 2 has no column `batchsize`"]),
        // Row 3 is a sample of whoever numbers them #1, #2, and a comment for others.
        ("id,loss,grad_norm,batchsize\n1,1,1,20\n#2,1,1,20\n", &["row 3", "comment", "holds a sample"]),
        ("# loss,grad_norm\n1,1,20\n", &["row 2", "header"]),
        ("# nothing else", &["row 1", "header", "is missing"]),
    ] {
        let error = read(content).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{content}: {error}");
    }
    // A sample that was taken out, by a mark on its first value.
    assert_eq!(read("loss,grad_norm,batchsize\n-2.5,3,20\n#99,3,20\n"), Ok(vec![SAMPLE]));
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, words) in [
        ("packed.csv", &b"\x1f\x8b\x08\x00\x00"[..], "gzip -d"),
        ("excel.csv", b"\xff\xfel\x00o\x00s\x00s\x00\n\x00", "UTF-16: save it as UTF-8"),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = read_samples(&path).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(words), "{error}");
    }
}

/// Another program's file, whose batch sizes are floats.
#[test]
fn a_file_of_float_batch_sizes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/cases/float_batch.csv");
    let Ok(content) = std::fs::read_to_string(path) else {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "skipped: {path} not found");
        return;
    };
    assert!(content.contains(",16.0,"));
    let samples = read(&content).unwrap();
    assert_eq!((samples.len(), samples[0].batch_size), (content.lines().count() - 1, 16));
    let digits = content.replace(".0,", ",");
    assert_ne!(digits, content);
    assert_eq!(read(&digits).unwrap(), samples);
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
        ("1,1e300,20,0\n", ["row 3", "`grad_norm`: 1e300"]),
        ("1,1e61,20,0\n", ["row 3", "`grad_norm`: 1e61 must be at most 1e60"]),
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
    // Rows count as an editor counts them, whatever their line breaks.
    for content in ["\r1,1,20,0\rx,1,20,0\r", "\r\n1,1,20,0\r\nx,1,20,0\r\n", "\n\nx,1,20,0\n"] {
        let error = read(&format!("loss,grad_norm,batchsize,time{content}")).unwrap_err();
        assert!(error.contains("row 3: column `loss`"), "{content:?}: {error}");
    }
    for row in ["1,1,20,\"a\n1,1,20,0\n", "1,1,20,\"a", "1,1,20,\"a\n1,1,20,\"b\n", "1,1,20,\"a\"\"\n"] {
        let error = read(&format!("{head}{row}")).unwrap_err();
        assert!(error.contains("row 3: a quote"), "{row:?}: {error}");
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
        ("loss,loss,grad_norm,batchsize\n1,2,1,20\n", "`loss` more than once"),
        ("loss,grad_norm, grad_norm,sq_grad_norm,batchsize\n1,2,1,1,20\n", "`grad_norm` more than once"),
        ("loss,sq_grad_norm,sq_grad_norm,batchsize\n1,2,1,20\n", "`sq_grad_norm` more than once"),
        ("batchsize,loss,grad_norm,batchsize\n1,2,1,20\n", "`batchsize` more than once"),
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

/// Neither is opened, so neither is waited for.
#[cfg(unix)]
#[test]
fn pipes_and_devices_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (pipe, link) = (folder.path().join("pipe"), folder.path().join("link"));
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo failed");
    std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
    for path in [pipe.as_path(), link.as_path(), std::path::Path::new("/dev/zero"), folder.path()] {
        for error in [
            read_samples(path).map(drop).unwrap_err(),
            rfdescent::covariance::Model::load(path).map(drop).unwrap_err(),
        ] {
            assert!(error.to_string().contains("not a regular file"), "{error}");
        }
    }
    // Links to files are followed.
    let (file, link) = (folder.path().join("file.csv"), folder.path().join("link.csv"));
    std::fs::write(&file, "loss,sq_grad_norm,batchsize\n-2.5,9,20\n").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_eq!(read_samples(&link).unwrap(), [SAMPLE]);
}

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn read_table(content: &str) -> Result<SampleTable, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("samples.csv");
    std::fs::write(&path, content).unwrap();
    SampleTable::read(&path).map_err(|error| error.to_string())
}

#[test]
fn columns_of_tensors_in_any_order_and_number() {
    for (content, tensors, squares) in [
        ("loss,grad_norm,batchsize,time\n-2.5,3,20,0\n", vec![], vec![]),
        ("loss,grad_norm,batchsize,time,sq_grad_norm:w\n-2.5,3,20,0,9\n", vec!["w"], vec![9.0]),
        (
            "sq_grad_norm:b.weight,loss,sq_grad_norm,sq_grad_norm:a,batchsize\n4.5,-2.5,9,4.25,20\n",
            vec!["b.weight", "a"],
            vec![4.5, 4.25],
        ),
        // Names with commas, quotes and colons.
        (
            "loss,grad_norm,batchsize,\"sq_grad_norm:a, b\",\"sq_grad_norm:say \"\"x\"\"\",sq_grad_norm:c:0\n-2.5,3,20,1,\"2\",6\n",
            vec!["a, b", "say \"x\"", "c:0"],
            vec![1.0, 2.0, 6.0],
        ),
        // White space around names means nothing, and 0 is a norm.
        ("loss,grad_norm,batchsize, sq_grad_norm: w \n-2.5,3,20, 0 \n", vec!["w"], vec![0.0]),
    ] {
        let table = read_table(content).unwrap();
        assert_eq!((&table.samples[..], &table.tensors[..]), (&[SAMPLE][..], &strings(&tensors)[..]));
        assert_eq!(table.sq_grad_norms, [squares], "{content}");
        let statistics = table.statistics().unwrap();
        let mut sorted = tensors.clone();
        sorted.sort();
        assert_eq!(statistics.tensors().collect::<Vec<_>>(), sorted);
        assert_eq!(read(content), Ok(vec![SAMPLE]));
    }
}

#[test]
fn errors_of_tensor_columns_name_row_and_column() {
    for cell in ["x", "", "nan", "inf", "-1", "1e121"] {
        let content = format!("loss,grad_norm,batchsize,sq_grad_norm:w,time\n1,1,20,1,0\n1,1,20,{cell},0\n");
        let error = read_table(&content).unwrap_err();
        assert!(error.contains("row 3: column `sq_grad_norm:w`"), "{error}");
        assert_eq!(read(&content).unwrap_err().rsplit("row 3").next(), error.rsplit("row 3").next());
    }
    for (header, words) in [
        ("sq_grad_norm:w,sq_grad_norm:w", "`sq_grad_norm:w` more than once"),
        ("sq_grad_norm:w,sq_grad_norm: w", "`sq_grad_norm:w` more than once"),
        ("sq_grad_norm: ,sq_grad_norm:w", "without a tensor"),
    ] {
        let error = read_table(&format!("loss,grad_norm,batchsize,{header}\n1,1,20,1,1\n")).unwrap_err();
        assert!(error.contains("row 1") && error.contains(words), "{error}");
    }
    // The last column of a tensor may be cut off.
    let error = read_table("loss,grad_norm,batchsize,sq_grad_norm:w\n1,1,20,1\n1,1,20,1").unwrap_err();
    assert!(error.contains("row 3") && error.contains("cut off"), "{error}");
}
