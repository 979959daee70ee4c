#!/usr/bin/env python3
"""Adds up the JUnit files of one test run; the last line is "N passed, N failed, N skipped"."""
import glob
import sys
import xml.etree.ElementTree as ElementTree

passed = failed = skipped = 0
for path in sorted(glob.glob(f"{sys.argv[1]}/*.xml")):
    root = ElementTree.parse(path).getroot()
    for suite in [root] if root.tag == "testsuite" else root.findall("testsuite"):
        count = {key: int(suite.get(key) or 0) for key in ("tests", "failures", "errors", "skipped", "disabled")}
        bad, left_out = count["failures"] + count["errors"], count["skipped"] + count["disabled"]
        passed += count["tests"] - bad - left_out
        failed += bad
        skipped += left_out
        for case in suite.findall("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                print(f"FAILED {case.get('classname')} {case.get('name')}")
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if failed or not passed else 0)
