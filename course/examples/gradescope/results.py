"""Write Gradescope's results.json from the CSV of `dlearn lessons grade`: python results.py < marks.csv"""

import csv
import json
import sys

tests = [
    {
        "name": f"{row['exercise']} ({row['student']}.py)",
        "score": 1.0 if row["passed"] == "true" else 0.0,
        "max_score": 1.0,
        "output": row["finding"] and f"{row['finding']}\n\nHint: {row['hint']}",
    }
    for row in csv.DictReader(sys.stdin)
]
json.dump({"tests": tests}, sys.stdout, indent=1)
